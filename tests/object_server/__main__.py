"""`python -m tests.object_server`: says in one line of JSON where it listens, then serves."""

import argparse
import asyncio
import gc
import json
import os
import signal
import socket
import ssl
from pathlib import Path

import uvloop

from tests.object_server.objects import Objects
from tests.object_server.protocol import Connection
from tests.object_server.script import Director, Script

_BACKLOG = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="folders of this folder are buckets")
    parser.add_argument(
        "--processes", type=int, default=1, help="that share the port; each has a script of its own"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=0, help="0 for any that is free")
    parser.add_argument(
        "--tls",
        nargs=2,
        metavar=("CERTIFICATE", "KEY"),
        help="PEM files: the shared port speaks TLS, as 127.0.0.1",
    )
    args = parser.parse_args()
    context = None
    if args.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*args.tls)
    shared = [_listen(args.port)]
    shared += [_listen(shared[0].getsockname()[1]) for _ in range(args.processes - 1)]
    own = [_listen(0) for _ in range(args.processes)]
    places = [f"://127.0.0.1:{one.getsockname()[1]}" for one in (shared[0], *own)]
    url = ("https" if context else "http") + places[0]
    admin = ["http" + place for place in places[1:]]
    print(json.dumps({"url": url, "admin": admin}), flush=True)
    children: list[int] = []
    number = _fork(args.processes, children)
    try:
        sockets = {shared[number]: context, own[number]: None}
        uvloop.run(_serve(sockets, args.root, args.seed + number))
    finally:
        for child in children:
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)


def _fork(num_processes: int, children: list[int]) -> int:
    """Fork into `num_processes`; return the number of this one. All others are children of 0."""
    for number in range(1, num_processes):
        child = os.fork()
        if not child:
            children.clear()
            return number
        children.append(child)
    return 0


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(_BACKLOG)
    return listening


async def _serve(
    sockets: dict[socket.socket, ssl.SSLContext | None], root: Path | None, seed: int
) -> None:
    objects, director = Objects(), Director(Script(), seed)
    if root:
        objects.map_folder(root)
    gc.freeze()
    # requests are in no cycles: a server must not be what a benchmark measures
    gc.set_threshold(50_000, 20, 50)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    servers = [
        await loop.create_server(
            lambda: Connection(objects, director), sock=one, backlog=_BACKLOG, ssl=context
        )
        for one, context in sockets.items()
    ]
    await stopping.wait()
    for server in servers:
        server.close()


if __name__ == "__main__":
    main()
