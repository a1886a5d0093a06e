"""The interpreter: imports the modules in its first message, then forks a process per request."""

import gc
import importlib
import json
import os
import runpy
import select
import socket
import sys
from typing import Any

MAX_REQUEST_BYTES = 128 << 10
NUM_DESCRIPTORS = 4  # the three standard streams, and the pipe for the pid and the exit status


def main() -> None:
    """Forks until the other end of standard input, a socket, is closed."""
    requests = socket.socket(fileno=os.dup(0))
    for name in json.loads(requests.recv(MAX_REQUEST_BYTES)):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would copy the pages that all processes share
    # By the pidfd of a process: its pid, and the pipe for its exit status.
    tellers: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != requests.fileno():
                poll.unregister(descriptor)
                tell_end(descriptor, *tellers.pop(descriptor))
                continue
            message, descriptors, _, _ = socket.recv_fds(
                requests, MAX_REQUEST_BYTES, NUM_DESCRIPTORS
            )
            if not message:
                return
            *streams, teller = descriptors
            pid = os.fork()
            if pid == 0:
                requests.close()
                for each in (teller, *tellers, *(other for _, other in tellers.values())):
                    os.close(each)
                become(json.loads(message), streams)
            for each in streams:
                os.close(each)
            os.write(teller, f"{pid}\n".encode())
            ended = os.pidfd_open(pid)
            tellers[ended] = pid, teller
            poll.register(ended, select.POLLIN)


def tell_end(descriptor: int, pid: int, teller: int) -> None:
    """Writes the exit status of a process that has ended to its pipe."""
    _, status = os.waitpid(pid, 0)
    os.write(teller, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os.close(teller)
    os.close(descriptor)


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Does what `python` with the request's arguments would do."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    flag, what, *arguments = request["command"]
    sys.argv = [flag, *arguments]
    if flag == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    sys.exit(0)


if __name__ == "__main__":
    main()
