"""Work in a thread that the end of the process does not wait for."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], name: str) -> Result:
    """The result of `work`, or its exception.

    The thread may wait for ever, for a file system that does not answer, say: where the caller is
    cancelled, the thread goes on alone. Threads of executors would keep the process from ending.

    Args:
        work: called in a thread of its own.
        name: of the thread.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Result] = loop.create_future()

    def run() -> None:
        done: concurrent.futures.Future[Result] = concurrent.futures.Future()
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(_hand_over, done, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result


def _hand_over(done: "concurrent.futures.Future[Result]", result: "asyncio.Future[Result]") -> None:
    if result.done():  # it was cancelled
        return
    if error := done.exception():
        result.set_exception(error)
    else:
        result.set_result(done.result())
