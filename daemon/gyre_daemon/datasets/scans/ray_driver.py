"""`python -m gyre_daemon.datasets.scans.ray_driver FD ADDRESS` has shards scanned by Ray.

Only a daemon starts it: see `ray_scans`. Ray starts threads and processes, and unpickles what its
workers return; here none of that is in the daemon. The address is that of a cluster, or `local`: a
Ray of this machine's own, which ends with the driver. Its files lie in a folder that is removed.

Over its connection the driver sends one message when Ray is there. Then it answers each message,
in any order. The messages are those of `workers.protocol`. The body of a question is a pickled
`ShardTask`; that of an answer is a reply of `server`, with an error or arrays. The first message
has the number 0. The driver ends when the daemon closes the connection.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from gyre_daemon.datasets.scans.server import failure_reply
from gyre_daemon.datasets.scans.tasks import scan_shard
from gyre_daemon.datasets.sidecars.file import encode
from gyre_daemon.errors import CorruptSample, GyreError, InvalidRequest
from gyre_daemon.workers.protocol import HEADER, Kind, read

LOCAL = "local"
# How often Ray repeats a task whose worker died. A shard that kills its workers has killed four
# then, as it would with any number.
_MAX_RETRIES = 3
_MAX_REASON_CHARS = 500


def main(connection: socket.socket, address: str) -> None:
    """Serve until the daemon is gone; see the module."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the daemon, which then hangs up
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray writes to both
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address == LOCAL:
        # Whoever reaches its ports must know the token. Ray would write one to the home folder.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray  # noqa: PLC0415  # it reads the environment

    with contextlib.ExitStack() as cleanup:
        try:
            if address == LOCAL:
                cleanup.enter_context(_own_ray(ray))
            else:
                ray.init(address, log_to_driver=False)
                cleanup.callback(ray.shutdown)
            first = encode("", {})
        except Exception as error:
            first = failure_reply(
                InvalidRequest(f"Ray at {address} cannot be used: {_reason(error)}")
            )
        with contextlib.suppress(ConnectionError):
            asyncio.run(_serve(ray, connection, first, address))


@contextlib.contextmanager
def _own_ray(ray: Any) -> Iterator[None]:
    """A Ray of this machine's own, with as many workers as the daemon may use cores."""
    folder = tempfile.mkdtemp(prefix="gyre-ray-")
    try:
        ray.init(
            LOCAL,
            num_cpus=len(os.sched_getaffinity(0)),
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


async def _serve(ray: Any, connection: socket.socket, first: bytes, address: str) -> None:
    """Send the first message, and answer questions until there are no more."""
    reader, writer = await asyncio.open_connection(sock=connection)
    scan = ray.remote(max_retries=_MAX_RETRIES)(scan_shard)

    def send(number: int, reply: bytes) -> None:
        writer.writelines([HEADER.pack(Kind.DONE, number, len(reply)), reply])

    async def answer(number: int, task: bytes) -> None:
        try:
            reply = await scan.remote(task)
        except ray.exceptions.RayError as error:
            reply = failure_reply(_failure(ray, error, address))
        send(number, reply)
        await writer.drain()

    send(0, first)
    async with asyncio.TaskGroup() as group:
        answering = set[asyncio.Task[None]]()
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                question = await read(reader)
                task = group.create_task(answer(question.number, bytes(question.body)))
                answering.add(task)
                task.add_done_callback(answering.discard)
        for task in answering:
            task.cancel()


def _failure(ray: Any, error: Exception, address: str) -> GyreError:
    """Why Ray returned no reply; the daemon knows which shard it is about."""
    if isinstance(error, ray.exceptions.WorkerCrashedError | ray.exceptions.OutOfMemoryError):
        reason = f"the Ray workers that indexed it died, {_MAX_RETRIES + 1} of them"
        return CorruptSample(reason, {"reason": reason})
    return InvalidRequest(
        f"Ray at {address} could not run the scan of a shard, for which its nodes need gyre-ml "
        f"with the daemon's extras, in the daemon's version: {_reason(error)}"
    )


def _reason(error: Exception) -> str:
    """The last line of an error, which in Ray's has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:_MAX_REASON_CHARS]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
