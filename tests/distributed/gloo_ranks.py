"""Real ranks for tests: processes in one gloo group, started once and given one program after the other."""

import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HOP_TIMEOUT_S = 20.0
RUN_DEADLINE_S = 90.0

Program = Callable[..., Any]


class RankFailed(AssertionError):
    """A rank raised, ended or hung; the message has its traceback."""


class Ranks:
    """``num_ranks`` processes; each runs every program, with its rank known from torch.distributed."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.broken = False
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, num_ranks, folder / "store"), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, program: Program, *args: Any) -> list[Any]:
        """What ``program(*args)`` returns on each rank."""
        for pipe in self._pipes:
            pipe.send((program, args))
        results: dict[Connection, Any] = {}
        deadline = time.monotonic() + RUN_DEADLINE_S
        while len(results) < len(self._pipes):
            ready = wait([pipe for pipe in self._pipes if pipe not in results], timeout=deadline - time.monotonic())
            if not ready:
                self._fail(f"no answer within {RUN_DEADLINE_S} s", stacks=True)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                results[pipe] = self._receive(pipe)
        return [results[pipe] for pipe in self._pipes]

    def end(self) -> None:
        """All processes are gone afterwards."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()

    def _receive(self, pipe: Connection) -> Any:
        try:
            succeeded, value = pipe.recv()
        except EOFError:
            self._fail("its process ended")
        if not succeeded:
            self._fail(value)
        return value

    def _fail(self, why: str, *, stacks: bool = False) -> None:
        self.broken = True
        if stacks:
            for process in self._processes:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        for process in self._processes:
            process.kill()
        raise RankFailed(f"one of {len(self._processes)} ranks: {why}")


def _serve(pipe: Connection, rank: int, num_ranks: int, store: Path) -> None:
    """One rank's life: a group, then programs until it is killed or its parent is gone."""
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("error")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = timedelta(seconds=HOP_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timeout)
    while True:
        try:
            program, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, program(*args)))
        except Exception:
            pipe.send((False, f"rank {rank} of {num_ranks}:\n{traceback.format_exc()}"))
