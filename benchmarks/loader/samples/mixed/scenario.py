"""Runs the ranks of a loader as processes, kills them, and lets others go on from their states."""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from benchmarks.loader.samples.mixed.documents import Sample, Steps, Variant

NUM_LOST = 2  # steps that ranks read behind their state before they are killed
_DEADLINE_S = 60.0
_CAUSE_S = 5.0


@dataclass(frozen=True)
class Rank:
    """One rank of one stage.

    Attributes:
        folder: with the data of all loaders.
        variant: the mixture to read.
        rank: of the process.
        world_size: number of ranks.
        first_step: of the stage.
        num_steps: of the stage.
        num_lost: steps that it reads behind its state.
        states: of all ranks of the stage before; empty at the beginning.
        address: of a daemon, if the loader has one.
        job: a name for all stages of this run.
    """

    folder: Path
    variant: Variant
    rank: int
    world_size: int
    first_step: int
    num_steps: int
    num_lost: int
    states: Sequence[Any]
    address: str
    job: str

    @property
    def weights(self) -> tuple[float, float]:
        """Those of the stage."""
        return self.variant.weights(self.first_step)

    @property
    def own_state(self) -> Any:
        """The state saved by this rank, or by another one if it did not exist; None for none."""
        return self.states[self.rank % len(self.states)] if self.states else None


class Reader(Protocol):
    """The interface of a loader's module to a rank."""

    def steps(self) -> Iterator[list[Sample]]:
        """The rank's samples of each step."""

    def state(self) -> Any:
        """A state behind the step that came last; it can be pickled."""


@dataclass
class Served:
    """A context for the ranks of a loader, with its daemon if it has one."""

    address: str = ""
    kill: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Contender:
    """A loader.

    Attributes:
        name: in the table.
        module: in this package; it has `write(folder)` and `reader(rank)`, and `around(folder)`,
            where a daemon runs beside the ranks.
        package: whose installed version is shown.
        imports: modules that must be importable.
        lacks: by a field of `Variant`, why the loader cannot be asked for that.
        is_always_packed: it serves nothing but packed sequences.
    """

    name: str
    module: str
    package: str
    imports: str
    lacks: dict[str, str] = field(default_factory=dict)
    is_always_packed: bool = False

    @property
    def path(self) -> str:
        """Of its module."""
        return f"{__package__}.{self.module}"

    def load(self) -> Any:
        """Its module."""
        return importlib.import_module(self.path)

    def around(self, folder: Path) -> AbstractContextManager["Served"]:
        """A context in which the ranks run."""
        make = getattr(self.load(), "around", None)
        served: AbstractContextManager[Served] = make(folder) if make else nullcontext(Served())
        return served


@dataclass(frozen=True)
class Stage:
    """Ranks that read steps; they are killed behind them, or end."""

    num_ranks: int
    num_steps: int
    is_killed: bool = True


class RefusedError(Exception):
    """A rank's exception."""


def run(
    contender: Contender, served: Served, folder: Path, variant: Variant, stages: Sequence[Stage]
) -> Steps:
    """The samples of all ranks, for each step that a state covers.

    Raises:
        RefusedError: a rank failed.
    """
    found: Steps = []
    states: Sequence[Any] = []
    job = f"{contender.module}-{os.urandom(4).hex()}"
    for stage in stages:
        ranks = [
            Rank(
                folder,
                variant,
                rank,
                stage.num_ranks,
                len(found),
                stage.num_steps,
                NUM_LOST if stage.is_killed else 0,
                states,
                served.address,
                job,
            )
            for rank in range(stage.num_ranks)
        ]
        parts, states = _run_stage(contender, ranks)
        if stage.is_killed:
            served.kill()
        found += [[sample for part in parts for sample in part[at]] for at in range(len(parts[0]))]
    return found


def _run_stage(contender: Contender, ranks: Sequence[Rank]) -> tuple[list[Steps], list[Any]]:
    context = multiprocessing.get_context("forkserver")
    port = _free_port()
    processes, pipes = [], []
    for rank in ranks:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_be_rank, args=(contender, rank, port, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    try:
        answers = _answers(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [steps for steps, _ in answers], [state for _, state in answers]


def _answers(pipes: Sequence[Connection]) -> list[tuple[Steps, Any]]:
    found: dict[Connection, tuple[Steps, Any]] = {}
    while len(found) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in found], _DEADLINE_S)
        if not ready:
            raise RefusedError(f"no answer within {_DEADLINE_S:.0f} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                is_done, answer = pipe.recv()
            except EOFError:
                raise RefusedError("a rank ended without a word") from None
            if not is_done:
                raise RefusedError(_cause(answer, [each for each in pipes if each is not pipe]))
            found[pipe] = answer
    return [found[pipe] for pipe in pipes]


def _cause(first: str, others: Sequence[Connection]) -> str:
    """The exceptions of ranks, without those that only tell of another rank's end."""
    causes = [first]
    while "gloo" in causes[-1] and (ready := wait(others, _CAUSE_S)):
        pipe = ready[0]
        assert isinstance(pipe, Connection)
        others = [each for each in others if each is not pipe]
        with contextlib.suppress(EOFError):
            is_done, answer = pipe.recv()
            causes += [] if is_done else [answer]
    return causes[-1]


def _be_rank(contender: Contender, rank: Rank, port: int, pipe: Connection) -> None:
    """Read the steps, save a state, read on, tell, and wait to be killed."""
    os.environ |= {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": str(rank.rank),
        "LOCAL_WORLD_SIZE": str(rank.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        reader: Reader = contender.load().reader(rank)
        steps = reader.steps()
        read = [next(steps) for _ in range(rank.num_steps)]
        answer = pickle.dumps((True, (read, reader.state())))
        for _ in range(rank.num_lost):
            next(steps)
        pipe.send_bytes(answer)
    except BaseException as error:
        first = str(error).strip().split("\n")[0]
        pipe.send_bytes(pickle.dumps((False, f"{type(error).__name__}: {first}")))
    finally:
        pipe.close()
    while True:
        signal.pause()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
