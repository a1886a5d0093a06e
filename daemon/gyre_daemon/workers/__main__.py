"""`python -m gyre_daemon.workers KIND DESCRIPTOR`: a fork server, connected there.

Only a daemon starts it: see `supervisor.ForkServer`.
"""

import socket
import sys

from gyre_daemon.workers.compute_workers import ComputeWork
from gyre_daemon.workers.copy_workers import CopyWork
from gyre_daemon.workers.supervisor import serve

if __name__ == "__main__":
    work = CopyWork() if sys.argv[1] == "copy" else ComputeWork()
    serve(socket.socket(fileno=int(sys.argv[2])), work)
