"""Weights of jobs: by the name that a client chooses, and by the user that the daemon knows."""

import fnmatch
from collections.abc import Mapping
from typing import NamedTuple


class Weights(NamedTuple):
    """The shares of a job's turns.

    Attributes:
        in_user: relative to other jobs of the same user.
        of_user: relative to other users.
    """

    in_user: float
    of_user: float


def weights_of(user: str, job: str, patterns: Mapping[str, float]) -> Weights:
    """The weights of a user's job.

    The first pattern that matches weighs the job among those of its user. A client chooses the name
    of its job, so only a pattern `USER/JOB` weighs against other users as well: the first one that
    matches.

    Args:
        user: the name of a principal.
        job: the job's name.
        patterns: weights by `JOB` or `USER/JOB`; the first slash ends the user.
    """
    named = [
        ("/" in pattern, weight)
        for pattern, weight in patterns.items()
        if _matches(user, job, pattern)
    ]
    return Weights(
        next((weight for _, weight in named), 1.0),
        next((weight for has_user, weight in named if has_user), 1.0),
    )


def _matches(user: str, job: str, pattern: str) -> bool:
    of_user, slash, of_job = pattern.partition("/")
    if not slash:
        return fnmatch.fnmatchcase(job, pattern)
    return fnmatch.fnmatchcase(user, of_user) and fnmatch.fnmatchcase(job, of_job)
