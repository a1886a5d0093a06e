"""Dry runs side by side, each in a process that is forked where everything is imported already."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
Job = Callable[[], Result]
# A process has about 300 MB of its own; more processes than jobs of a plan would do nothing.
_MAX_PROCESSES = 8


def side_by_side(jobs: Sequence[Job[Any]]) -> list[Any]:
    """The result of each job, computed on the cores that this process may use.

    Jobs must not communicate or use a device: their processes share neither threads nor contexts
    with this one. The first jobs should be those that take longest.

    Raises:
        Exception: the error of the first job, in their order, that failed.
    """
    num_processes = min(_MAX_PROCESSES, len(jobs), len(os.sched_getaffinity(0)))
    if num_processes == 1:
        return [job() for job in jobs]
    with ProcessPoolExecutor(num_processes, get_context("fork"), _begin) as processes:
        started = [processes.submit(job) for job in jobs]
        try:
            return [each.result() for each in started]
        finally:
            processes.shutdown(cancel_futures=True)


def _begin() -> None:
    """Torch's threads were not forked; a process that waits for them would wait for ever."""
    torch.set_num_threads(1)
