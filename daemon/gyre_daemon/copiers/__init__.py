"""Copying out of mapped files by plain loads and stores, in processes that may die of it.

A file that shrinks, or whose disk fails, ends whoever copies out of its mapping with SIGBUS. The kernel's copies
(`storage/gather.py`) survive that, and small samples take them twice as long. So the daemon has a few processes that do nothing
else: they map the served files, and each arena before it is sealed. One that dies loses nothing but its job, which the daemon
then does the kernel's way, and is replaced at once. What they cannot do is told, and done the other way.
"""

from gyre_daemon.copiers.pool import NO_COPIERS, Copiers, new_key
from gyre_daemon.copiers.ranges import Ranges

__all__ = ["NO_COPIERS", "Copiers", "Ranges", "new_key"]
