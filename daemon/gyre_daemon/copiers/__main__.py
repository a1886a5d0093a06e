"""`python -m gyre_daemon.copiers DESCRIPTOR`: a keeper, connected there. Only a daemon starts it: see `keeper`."""

import os
import socket
import sys

from gyre_daemon.copiers.process import run
from gyre_daemon.copiers.wire import Reply, send_reply

if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    send_reply(connection, Reply(is_done=True, value=os.getpid()))
    run(connection)
