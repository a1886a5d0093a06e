"""Weights that running jobs on mixtures were given, from steps on; they outlive the daemon.

[Note: How a running job gets other weights] A change is written to a file of the daemon, and all
sessions of the job end in the same moment. Their clients open sessions again, each at the cursor of
the last batch that it received. None of them had received the step of the change, so each gets the
change into its cursor, and all ranks read the new weights from the same step on. From then on the
cursor has it, wherever the job resumes. A state that was saved before the change was made does not
have it: then the file does, under the name of the job. A rank that opens its first session
meanwhile, without a cursor, is a late rank of the job, and no new job of its name: so it is until a
session is open again, or until the others would have opened theirs long ago.

A job whose ranks read at several daemons is given a change by each of them. Where one of them
fails, the others withdraw it. The withdrawal, too, is written, and removes the change from cursors
of sessions that are opened again, as long as they stand before its step.
"""

import errno
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gyre_daemon.errors import ConfigError, CursorRejected, InvalidRequest, Overloaded
from gyre_daemon.order.cursor import Cursor
from gyre_daemon.order.mixing.quotas import Phase, are_phases
from gyre_daemon.runtime.ownership import make_folder, open_ours
from gyre_daemon.storage.mounts import MOUNTS

_FILE = "weights.jsonl"
_MAX_FILE_BYTES = 16 << 20
# One user's changes may fill this much of it, and as much again with taking them back. With more,
# one user could keep all others from changing their weights.
_MAX_USER_BYTES = 1 << 20
# Ranks open their sessions again at once; they may measure or index before they are there.
_REOPENING_S = 300.0


@dataclass(frozen=True, slots=True)
class JobOnMixture:
    """One job on one mixture.

    Attributes:
        user: the owner of the job.
        job: its name.
        mixture: the name of the mixture.
        fingerprint: of the mixture.
    """

    user: str
    job: str
    mixture: str
    fingerprint: str


class WeightChanges:
    """The changes of all jobs of a daemon."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Look for the changes that were written before.

        Args:
            folder: of the daemon.
            clock: seconds, from any moment on.

        Raises:
            ConfigError: the file is there and cannot be read, or others control it.
        """
        self._path = folder / _FILE
        self._changes: dict[JobOnMixture, list[Phase]] = {}
        self._withdrawn: dict[JobOnMixture, list[Phase]] = {}
        self._clock = clock
        self._reopening: dict[JobOnMixture, float] = {}  # until when its ranks may open again
        self._num_bytes: Counter[str] = Counter()  # of the file, by user
        try:
            with os.fdopen(open_ours(self._path, os.O_RDONLY), "rb") as file:
                for line in file.read(_MAX_FILE_BYTES).splitlines():
                    self._replay(line)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(
                f"the changes of weights in {self._path} cannot be read: {error.strerror}"
            ) from error

    def _replay(self, line: bytes) -> None:
        try:
            user, job, mixture, fingerprint, change = json.loads(line)
            key = JobOnMixture(user, job, mixture, fingerprint)
            is_withdrawn = isinstance(change, dict)
            step, *weights = change["withdrawn"] if is_withdrawn else change or [0]
        except (ValueError, TypeError, KeyError):  # a line that was cut off by a crash
            return
        self._num_bytes[user] += len(line) + 1
        phase = Phase(step, tuple(weights))
        if not change:
            self._forget(key)
        elif is_withdrawn:
            self._note_withdrawn(key, phase)
        else:
            self._note_given(key, phase)

    def applied(self, cursor: Cursor, key: JobOnMixture) -> Cursor:
        """A job's cursor with the changes that it was given.

        Raises:
            CursorRejected: a change began before the cursor, which does not have it; or it has one
                that was withdrawn.
        """
        position, size = cursor.position, cursor.order.global_batch_size
        for phase in self._withdrawn.get(key, ()):
            if cursor.mixture and phase in cursor.mixture.phases:
                if phase.first_step * size < position:
                    raise CursorRejected(
                        f"the change of the weights of `{key.mixture}` at step {phase.first_step} "
                        f"was withdrawn from the job `{key.job}`, and this state of step "
                        f"{position // size} read on with it. End all ranks, and resume them from "
                        "an earlier state.",
                        {"differs": "the weights"},
                    )
                cursor = _without(cursor, phase)
        for phase in self._changes.get(key, ()):
            if cursor.mixture and phase in cursor.mixture.phases:
                continue
            if phase.first_step * size < position:
                raise CursorRejected(
                    f"the job `{key.job}` was given other weights of `{key.mixture}` from step "
                    f"{phase.first_step} on, and this state of step {position // size} read on "
                    "without them. End all ranks, and resume them from one state.",
                    {"differs": "the weights"},
                )
            cursor = changed(cursor, phase)
        return cursor

    async def check_answers(self) -> None:
        """Refuse changes while the file cannot be reached, which is written on the event loop.

        Raises:
            Overloaded: its mount hangs.
        """
        try:
            await MOUNTS.answered(self._path.parent, self._path.exists)
        except TimeoutError as error:
            raise self._not_recorded(error) from error

    def knows(self, key: JobOnMixture) -> bool:
        """Whether a job was given changes, or they were taken back."""
        return key in self._changes or key in self._withdrawn

    def give(self, key: JobOnMixture, phase: Phase) -> None:
        """Record a change.

        Raises:
            Overloaded: it cannot be written, or the user has recorded as many as one may.
        """
        self._check_user(key.user, _MAX_USER_BYTES)
        self._write(key, [phase.first_step, *phase.weights])
        self._note_given(key, phase)
        self._reopening[key] = self._clock() + _REOPENING_S

    def withdraw(self, key: JobOnMixture, phase: Phase) -> None:
        """Record that a change, which may have been given, does not count.

        Raises:
            Overloaded: as `give`.
        """
        self._check_user(key.user, 2 * _MAX_USER_BYTES)  # room to take each change back
        self._write(key, {"withdrawn": [phase.first_step, *phase.weights]})
        self._note_withdrawn(key, phase)
        self._reopening[key] = self._clock() + _REOPENING_S

    def jobs_with(self, phase: Phase) -> list[JobOnMixture]:
        """The jobs that were given a change."""
        return [key for key, phases in self._changes.items() if phase in phases]

    def was_opened(self, key: JobOnMixture) -> None:
        """A session of the job is open, so a new one is no late rank of a change any more."""
        self._reopening.pop(key, None)

    def forget(self, key: JobOnMixture) -> None:
        """A job of this name begins again: it has been given nothing.

        While its ranks open their sessions again for a change, a new session is a late rank of
        theirs, and nothing is forgotten.

        Raises:
            Overloaded: that cannot be written.
        """
        if self.knows(key) and self._clock() >= self._reopening.get(key, 0.0):
            self._write(key, None)
            self._forget(key)

    def _forget(self, key: JobOnMixture) -> None:
        for each in (self._changes, self._withdrawn, self._reopening):
            each.pop(key, None)

    def _note_given(self, key: JobOnMixture, phase: Phase) -> None:
        _put(phase, self._changes.setdefault(key, []), self._withdrawn.get(key, []))

    def _note_withdrawn(self, key: JobOnMixture, phase: Phase) -> None:
        _put(phase, self._withdrawn.setdefault(key, []), self._changes.get(key, []))

    def _check_user(self, user: str, most_bytes: int) -> None:
        if self._num_bytes[user] >= most_bytes and not self._path.exists():
            self._num_bytes.clear()  # the operator has removed the file
        if (num_bytes := self._num_bytes[user]) >= most_bytes:
            raise Overloaded(
                f"{user} has {num_bytes} bytes of changes of weights in {self._path}, and may have "
                f"{most_bytes}. Ask the operator to remove the file when no job needs it."
            )

    def _write(self, key: JobOnMixture, change: list[int] | dict[str, list[int]] | None) -> None:
        line = json.dumps([key.user, key.job, key.mixture, key.fingerprint, change]) + "\n"
        try:
            make_folder(self._path.parent)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with os.fdopen(open_ours(self._path, flags), "ab") as file:
                if file.seek(0, os.SEEK_END) + len(line) > _MAX_FILE_BYTES:
                    raise OSError(errno.EFBIG, "it is full; remove it when no job needs it")
                file.write(line.encode())
            self._num_bytes[key.user] += len(line)
        except OSError as error:
            raise self._not_recorded(error) from error

    def _not_recorded(self, error: OSError) -> Overloaded:
        return Overloaded(
            f"a change of weights cannot be recorded in {self._path}: {error.strerror}"
        )


def changed(cursor: Cursor, phase: Phase) -> Cursor:
    """A cursor with one more phase.

    Raises:
        InvalidRequest: a phase begins at that step already, or a state cannot hold more.
    """
    mixture = cursor.mixture
    assert mixture
    if any(each.first_step == phase.first_step for each in mixture.phases):
        raise InvalidRequest(
            f"weights begin at step {phase.first_step} already; choose another step"
        )
    phases = tuple(sorted((*mixture.phases, phase), key=_first_step))
    given = tuple(sorted((*mixture.given, phase.first_step)))
    more = replace(cursor, mixture=replace(mixture, phases=phases, given=given))
    if not are_phases(phases, len(mixture.sources)) or not more.fits:
        raise InvalidRequest(
            f"the job has {len(mixture.phases)} changes of weights, and a state holds no more"
        )
    return more


def _without(cursor: Cursor, phase: Phase) -> Cursor:
    """A cursor without a phase that it was given."""
    mixture = cursor.mixture
    assert mixture
    phases = tuple(each for each in mixture.phases if each != phase)
    given = tuple(each for each in mixture.given if each != phase.first_step)
    return replace(cursor, mixture=replace(mixture, phases=phases, given=given))


def _put(phase: Phase, into: list[Phase], out_of: list[Phase]) -> None:
    if phase not in into:
        into.append(phase)
    if phase in out_of:
        out_of.remove(phase)


def _first_step(phase: Phase) -> int:
    return phase.first_step
