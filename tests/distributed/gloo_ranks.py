"""Real ranks for tests: processes in one gloo group that run one program after another."""

import faulthandler
import gc
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gyre_trainer import rotate

HOP_TIMEOUT_S = 120.0
RUN_DEADLINE_S = 300.0

# Imported once, by a process that ranks are then forked from: most of what a rank's start costs. Of
# these, transformers alone takes 2 s in each rank of each file that has models of it.
PRELOADED = [
    "pytest",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.state_dict_loader",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "gyre_trainer.training.gpt",
    "gyre_trainer.pretrained",
]

Program = Callable[..., Any]


class RankFailed(AssertionError):
    """A rank raised, ended or hung; the message has its traceback."""


class Ranks:
    """``num_ranks`` processes that all run every program; `torch.distributed` knows their ranks."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.ended = False
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, num_ranks, folder / "store"), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, program: Program, *args: Any) -> list[Any]:
        """The result of ``program(*args)`` on each rank."""
        results: dict[int, Any] = {}
        for rank, succeeded, value in self._answers(program, args):
            if not succeeded:
                self.end()
                raise RankFailed(f"rank {rank} of {len(self._processes)}: {value}")
            results[rank] = value
        return [results[rank] for rank in sorted(results)]

    def run_to_the_end(self, program: Program, *args: Any) -> list[Any]:
        """As `run`, with None for a rank that raised or ended; the ranks cannot be used again."""
        answers = {
            rank: value if succeeded else None
            for rank, succeeded, value in self._answers(program, args)
        }
        self.end()
        return [answers[rank] for rank in sorted(answers)]

    def _answers(self, program: Program, args: tuple[Any, ...]) -> Iterator[tuple[int, bool, Any]]:
        """Yield (rank, whether it succeeded, its result or traceback) as the ranks finish."""
        waiting = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        for pipe in waiting:
            pipe.send((program, args))
        deadline = time.monotonic() + RUN_DEADLINE_S
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._show_stacks()
                self.end()
                raise RankFailed(
                    f"ranks {sorted(waiting.values())} did not answer within {RUN_DEADLINE_S} s"
                )
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                try:
                    yield waiting.pop(pipe), *pipe.recv()
                except EOFError:
                    yield self._pipes.index(pipe), False, "its process ended"

    def end(self) -> None:
        """End all processes and wait until they are gone."""
        self.ended = True
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()

    def _show_stacks(self) -> None:
        for process in self._processes:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)


def _serve(pipe: Connection, rank: int, num_ranks: int, store: Path) -> None:
    """The main function of a rank: join the group, then run programs until it is killed."""
    gc.freeze()  # a collection would copy the pages that all ranks share
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("error")
    # peft 0.21 itself asks transformers 5.24 for it
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # Modules of tests are small, and rotate all the same.
    rotate.SMALL_NUMEL = 0
    timeout = timedelta(seconds=HOP_TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timeout
    )
    while True:
        try:
            program, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, program(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
