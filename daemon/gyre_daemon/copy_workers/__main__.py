"""`python -m gyre_daemon.copy_workers DESCRIPTOR`: a fork server, connected there.

Only a daemon starts it: see `worker.spawn_fork_server`.
"""

import socket
import sys

from gyre_daemon.copy_workers.process import run
from gyre_daemon.copy_workers.protocol import Reply, send_reply

if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    send_reply(connection, Reply(is_done=True))
    run(connection)
