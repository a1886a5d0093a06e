"""A loader's turn: a model trains for some seconds in a process of its own.

The process is forked from one that has imported all modules.
"""

import multiprocessing
import os
import warnings
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

from benchmarks.loader.processes import cpu_s, family
from benchmarks.training.loaders import Kind, Source, opener
from benchmarks.training.models import Architecture
from benchmarks.training.trainer import Trainer, train_for

_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Turn:
    """The work of one turn.

    Attributes:
        kind: the kind of loader.
        source: where its data is.
        architecture: the model.
        duration_s: seconds from the first batch on.
        also_pids: processes that work for the loader besides its own.
    """

    kind: Kind
    source: Source
    architecture: Architecture
    duration_s: float
    also_pids: tuple[int, ...] = ()


def take(turn: Turn) -> dict[str, Any]:
    """Take the turn; return a Pace's fields and `cpu_s`.

    `cpu_s` is the CPU time of the trainer, its workers and ``also_pids``, from before the first
    batch on.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=_perform, args=(theirs, turn))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_TIMEOUT_S):
            raise RuntimeError(f"no result of {turn} within {_TIMEOUT_S:.0f} s")
        answer: dict[str, Any] = ours.recv()
        process.join(_TIMEOUT_S)
        return answer
    finally:
        process.kill()
        process.join()
        ours.close()


def _perform(answer: Connection, turn: Turn) -> None:
    torch.set_num_threads(1)
    # more workers than cores: they wait, most of the time
    warnings.filterwarnings("ignore", "This DataLoader will create")
    trainer = Trainer(turn.architecture.build(turn.source.seed), turn.architecture.lr)
    open_batches = opener(turn.kind, turn.source)
    before_s = _cpu_s(turn)
    pace = train_for(trainer, open_batches, turn.duration_s)
    answer.send({**asdict(pace), "cpu_s": _cpu_s(turn) - before_s})
    for child in psutil.Process().children(recursive=True):
        child.kill()  # workers would first finish unwanted batches
    os._exit(0)


def _cpu_s(turn: Turn) -> float:
    return cpu_s([*family(os.getpid()), *turn.also_pids])
