"""A job that is stopped and resumed on other numbers of ranks, while its daemon is killed."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from gyre_client import Loader

from tests.batches import Batch
from tests.conftest import Daemon

OpenRank = Callable[[int, int], Loader]  # of a rank, and of the number of ranks
T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """What a job does between two resumes.

    Attributes:
        num_ranks: How many ranks read.
        num_steps: How many steps each of them reads.
        kill_before: The daemon is killed and started again before this step of the stage.
    """

    num_ranks: int
    num_steps: int
    kill_before: int | None = None


def in_stages(
    daemon: Daemon,
    open_rank: OpenRank,
    stages: Iterable[Stage],
    whole: Callable[[list[Batch]], T],
    check: Callable[[list[Loader]], None] = lambda ranks: None,
    state: dict[str, Any] | None = None,
) -> tuple[list[T], dict[str, Any]]:
    """Reads stage after stage; all ranks must agree about the state at the end of each.

    Args:
        daemon: What the stages kill.
        open_rank: Opens the loader of one rank.
        stages: In their order; each resumes the one before it.
        whole: Makes what is kept of a step from the batches of its ranks.
        check: Called with the loaders before each step.
        state: Where the first stage begins; None for the beginning.

    Returns:
        What `whole` made of each step, and the state behind the last one.
    """
    found: list[T] = []
    for stage in stages:
        assert stage.kill_before is None or stage.kill_before < stage.num_steps
        with contextlib.ExitStack() as stack:
            ranks = [
                stack.enter_context(open_rank(rank, stage.num_ranks))
                for rank in range(stage.num_ranks)
            ]
            for each in ranks:
                if state:
                    each.load_state_dict(state)
            streams = [each.stream() for each in ranks]
            for step in range(stage.num_steps):
                if step == stage.kill_before:
                    daemon.kill()
                    daemon.restart()
                check(ranks)
                found.append(whole([next(stream) for stream in streams]))
            states = [each.state_dict() for each in ranks]
            assert all(each == states[0] for each in states)
            state = states[0]
    assert state
    return found, state
