"""How a few connections are shared among hosts."""

import resource
from typing import Any

from gyre_daemon.runtime.limits import DescriptorShares
from gyre_daemon.storage.engine.policies import AdaptiveLimit
from gyre_daemon.storage.sources.http_source import _SignedTarget
from gyre_daemon.storage.sources.plain_http import ConnectionBudget, HttpGet


class Host:
    """Asks for connections as a `PlainHttp` does."""

    def __init__(self, connections: Any) -> None:
        self._connections = connections
        self.num_idle = 0
        self.num_open = 0
        self.num_wanted = 0

    def want(self, num: int) -> None:
        self.num_wanted += num
        self.has_room()

    def has_room(self) -> None:
        while self.num_wanted and self._connections.take(self):
            self.num_wanted -= 1
            self.num_open += 1

    def close_idle(self) -> bool:
        self.num_idle -= 1
        return self.num_idle >= 0

    def closed(self) -> None:
        self.num_open -= 1
        self._connections.give_back()


def test_the_budget_is_never_exceeded() -> None:
    connections: Any = ConnectionBudget(3)
    first, second = Host(connections), Host(connections)
    first.want(5)
    second.want(2)
    assert (first.num_open, second.num_open, connections.num_left) == (3, 0, 0)
    assert connections.is_wanted_by_others(first)
    assert connections.is_wanted_by_others(second), "the first wants more, too"
    first.closed()
    assert (first.num_open, second.num_open) == (3, 0), "who asked first"
    first.closed()
    assert (first.num_open, second.num_open) == (2, 1)


def test_an_idle_connection_makes_room_for_another_host() -> None:
    connections: Any = ConnectionBudget(2)
    first, second = Host(connections), Host(connections)
    first.want(2)
    first.num_idle = 1
    second.want(1)
    assert first.num_idle == 0, "it was closed"
    first.closed()
    assert (first.num_open, second.num_open) == (1, 1)
    assert not connections.is_wanted_by_others(first)


def test_a_forgotten_pool_no_longer_waits() -> None:
    connections: Any = ConnectionBudget(1)
    first, second = Host(connections), Host(connections)
    first.want(1)
    second.want(1)
    connections.forget(second)
    first.closed()
    assert (connections.num_left, second.num_open) == (1, 0)


def test_half_of_the_descriptors_is_kept_for_clients() -> None:
    for limit in (64, 256, 1024, 4096):
        shares = DescriptorShares.of(limit)
        assert shares.connections + 2 * shares.shards <= limit // 2
    assert DescriptorShares.of(256) == DescriptorShares(256, 64, 32, 32, 4)
    assert DescriptorShares.of(resource.RLIM_INFINITY).connections > 1 << 20
    assert DescriptorShares.of(1 << 30).shards == 32768, "mappings are bounded, too"


def test_a_lower_ceiling_holds_whatever_is_answered() -> None:
    limit = AdaptiveLimit(1024)
    limit.lower_ceiling(64)
    assert limit.limit == 64
    for _ in range(1000):
        limit.done(limit.round, limit.limit, 0.001)
    assert limit.limit == 64
    limit.lower_ceiling(2)
    limit.lower_ceiling(500)
    assert limit.limit == 2


def test_nothing_that_prints_a_request_prints_its_credentials() -> None:
    text = b"GET / HTTP/1.1\r\nAuthorization: Bearer hunter2\r\n"
    get = HttpGet(text, 1, None, url="https://host/object?signature=hunter2")
    target = _SignedTarget(0.0, get.url, text, waiting=[get])
    assert "hunter2" not in f"{get!r} {target!r}"
