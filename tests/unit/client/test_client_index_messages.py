"""How many messages about an index a client takes from a daemon, and of which kinds."""

from collections.abc import Callable, Sequence

import pytest
from gyre_client.errors import DaemonFault
from gyre_client.transport.answers import checked_progress
from gyre_protos.v1 import loader_pb2 as pb

NUM = 3
Message = pb.IndexProgress


def shard(number: int) -> Message:
    return Message(num_shards=NUM, shards_done=number, shard=f"{number}.tar")


def column(name: str) -> Message:
    return Message(num_shards=NUM, column=pb.ColumnProgress(name=name))


def measured() -> Message:
    return Message(num_shards=NUM, measured=pb.MeasuringProgress())


def messages(num_shards: int, names: Sequence[str], num_measured: int) -> list[Message]:
    """Messages about shards, about columns of these names, and about measuring."""
    shards = [shard(number) for number in range(num_shards)]
    return [*shards, *map(column, names), *(measured() for _ in range(num_measured))]


ALL = messages(NUM, ["a"] * (NUM + 1) + ["b"] * (NUM + 1), 2 * (NUM + 1))


def test_each_pass_over_the_shards_has_a_message_more_than_shards() -> None:
    assert list(checked_progress(ALL)) == ALL


@pytest.mark.parametrize(
    "more",
    [
        lambda: shard(9),
        lambda: column("a"),
        lambda: column("b"),
        measured,
        lambda: Message(num_shards=NUM + 1, column=pb.ColumnProgress(name="c")),
    ],
)
def test_more_is_refused(more: Callable[[], Message]) -> None:
    with pytest.raises(DaemonFault, match="about an index of 3 shards, which does not fit"):
        list(checked_progress([*ALL, more()]))


def test_columns_without_an_end_are_refused() -> None:
    names = [f"column {number}" for number in range(1000)]
    with pytest.raises(DaemonFault, match="message 1003 about an index"):
        list(checked_progress(messages(NUM, names, 0)))
