"""Memory that the node's cache lends while it is free."""

from concurrent.futures import ThreadPoolExecutor

from gyre_daemon.monitoring.metrics import CacheCounts
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.cache.node import NodeCache


def test_no_more_is_lent_than_is_free() -> None:
    with ThreadPoolExecutor(1) as threads:
        node = NodeCache(100, None, FairExecutor(threads, 1), CacheCounts())
        assert node.lend(60)
        assert not node.lend(60)
        assert node.lend(40)
        node.take_back(60)
        assert not node.lend(61)
        assert node.lend(60)
