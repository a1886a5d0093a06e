"""Threads that the end of the process does not wait for.

A thread that asks a file system which does not answer waits for ever. The interpreter joins the
threads of `concurrent.futures` when it ends, and asyncio's default executor is shared by everything
in the process, so that one hung mount would stop the daemon. Nothing here is ever joined.
"""

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_Work = Callable[[], Callable[[], None]]

# Threads without work end after this long. They take some ten microseconds to start again.
_IDLE_S = 30.0
_WHOLE_PROCESS = 2  # as the kernel builds the number of a process's clock


@dataclass(slots=True, eq=False)
class _Worker:
    """One thread of an executor, or a process that is counted among them.

    Attributes:
        clock: its processor time, for `time.clock_gettime`.
        is_busy: whether it has work.
        cpu_ns: the processor time that it had taken when it was last looked at.
        still_since: the time of the first look that found this processor time.
    """

    clock: int = 0
    is_busy: bool = False
    cpu_ns: int = -1
    still_since: float = 0.0


def _nothing() -> None:
    """Do nothing: the result is not wanted any more."""


class DaemonThreads(Executor):
    """An executor of daemon threads, started when they are needed."""

    def __init__(self, max_threads: int, name: str) -> None:
        """Start no thread yet.

        Args:
            max_threads: that work at once; further work waits.
            name: of the threads.
        """
        self.max_threads = max_threads
        self._name = name
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._workers: set[_Worker] = set()
        self._processes: set[_Worker] = set()
        self._num_pending = 0  # waiting or running
        self._is_shut_down = False

    def submit(
        self,
        work: Callable[Arguments, Result],
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Future[Result]:
        """Have a thread call `work`.

        Raises:
            RuntimeError: the executor is shut down.
        """
        future: Future[Result] = Future()

        def run() -> Callable[[], None]:
            if not future.set_running_or_notify_cancel():
                return _nothing
            try:
                return partial(future.set_result, work(*args, **kwargs))
            except BaseException as error:
                return partial(future.set_exception, error)

        self.start(run)
        return future

    def start(self, work: _Work) -> None:
        """Have a thread call `work`, which raises nothing, and then what it returned.

        Raises:
            RuntimeError: the executor is shut down.
        """
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError(f"{self._name}: the executor is shut down")
            self._num_pending += 1
            self._tasks.put(work)
            if len(self._workers) < min(self._num_pending, self.max_threads):
                worker = _Worker()
                self._workers.add(worker)
                threading.Thread(
                    target=self._serve, args=(worker,), name=self._name, daemon=True
                ).start()

    async def run(
        self,
        work: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Wait for the result of `work` in a thread, or its exception.

        A thread cannot be stopped: if the caller is cancelled, it goes on alone.
        """
        return await asyncio.wrap_future(self.submit(work, *args, **kwargs))

    @property
    def num_threads(self) -> int:
        """The threads that there are now."""
        return len(self._workers)

    @contextlib.contextmanager
    def counting(self, pid: int) -> Iterator[None]:
        """Count a process among the threads that `still_since` looks at, inside the context."""
        process = _Worker(~pid << 3 | _WHOLE_PROCESS, is_busy=True)
        self._processes.add(process)
        try:
            yield
        finally:
            self._processes.discard(process)

    def still_since(self) -> float | None:
        """Since when a thread waits inside one call, in seconds of the monotonic clock.

        A thread whose processor time stays the same waits for the kernel. One that lists a large
        folder or reads a large file makes progress, however long it takes. Call this regularly: the
        answer is as exact as the looks are frequent.

        Returns:
            The earliest such time of all threads; None if none has work.
        """
        now = time.monotonic()
        with self._lock:
            busy = [worker for worker in self._workers | self._processes if worker.is_busy]
            for worker in busy:
                cpu_ns = _processor_ns(worker.clock)
                if cpu_ns != worker.cpu_ns:
                    worker.cpu_ns, worker.still_since = cpu_ns, now
        return min((worker.still_since for worker in busy), default=None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further work, and let idle threads end; threads with work are never joined.

        Args:
            wait: without effect.
            cancel_futures: without effect: work that waits is done, if the process lives on.
        """
        with self._lock:
            self._is_shut_down = True
            for _ in self._workers:
                self._tasks.put(None)

    def _serve(self, worker: _Worker) -> None:
        worker.clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            while task := self._next(worker):
                worker.is_busy = True
                tell = task()
                with self._lock:  # whoever is told may have more work for this thread
                    self._num_pending -= 1
                tell()
                del task, tell  # they hold the arguments
                worker.is_busy = False
        finally:  # nothing may look at an ended thread
            with self._lock:
                self._workers.discard(worker)

    def _next(self, worker: _Worker) -> _Work | None:
        """Wait for work; None where the thread should end."""
        while True:
            try:
                return self._tasks.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._num_pending < len(self._workers):
                        self._workers.discard(worker)
                        return None


def _processor_ns(clock: int) -> int:
    try:
        return time.clock_gettime_ns(clock)
    except OSError:  # the process has ended
        return -1


# For pure computation. With one for each core, small work would wait behind large.
_compute = DaemonThreads(len(os.sched_getaffinity(0)) + 4, "gyre-compute")


async def compute(
    work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Compute something in a thread. `work` must not touch any file: see `storage.mounts`."""
    return await _compute.run(work, *args, **kwargs)


async def in_thread(work: Callable[[], Result], name: str) -> Result:
    """Wait for the result of `work`, or its exception, in a thread that serves nothing else.

    Args:
        work: may wait for ever. If the caller is cancelled, the thread goes on alone.
        name: of the thread.
    """
    threads = DaemonThreads(1, name)
    try:
        return await threads.run(work)
    finally:
        threads.shutdown()
