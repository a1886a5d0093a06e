"""Dry runs side by side, each in a process that is forked where everything is imported already."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from gyre_common.parent import die_with

Result = TypeVar("Result")
Job = Callable[[], Result]
# A process has about 300 MB of its own; more processes than jobs of a plan would do nothing.
_MAX_PROCESSES = 8


def side_by_side(jobs: Sequence[Job[Any]]) -> list[Any]:
    """The result of each job, computed on the cores that this process may use.

    Jobs must not communicate or use a device: their processes share neither threads nor contexts
    with this one.

    Args:
        jobs: what is to be computed; the first ones should be those that take longest.

    Raises:
        Exception: the error of the first job, in their order, that failed.
    """
    num_processes = min(_MAX_PROCESSES, len(jobs), len(os.sched_getaffinity(0)))
    if num_processes == 1:
        return [job() for job in jobs]
    with ProcessPoolExecutor(
        num_processes, get_context("fork"), _begin, (os.getpid(),)
    ) as processes:
        started = [processes.submit(job) for job in jobs]
        try:
            return [each.result() for each in started]
        finally:
            processes.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    """End with the parent, whose pipes no one else reads, and do without the threads of torch.

    They were not forked; a process that waits for them would wait for ever.
    """
    die_with(parent)
    torch.set_num_threads(1)
