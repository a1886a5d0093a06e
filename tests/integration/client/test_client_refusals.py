"""What a Loader refuses itself, and how it passes the daemon's errors on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset
from gyre_client import Loader
from gyre_client.errors import (
    CorruptSample,
    CursorRejected,
    Fenced,
    InvalidRequest,
    Overloaded,
    UnknownDataset,
)
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

from tests.batches import SAMPLE_LENGTH, take
from tests.stub_daemon import BATCH_SIZE, StubDaemon


def test_a_request_that_is_too_long_is_refused_and_not_retried(numbers: str) -> None:
    """Another attempt could not succeed."""
    long = f"/data/{{{','.join(f'shard-{number:08}' for number in range(8000))}}}.bin"
    sentence = (
        r"the request has \d+ bytes, and a message to or from a daemon may have 65536: shorten"
    )
    with pytest.raises(InvalidRequest, match=sentence) as refused:
        Loader(
            long,
            batch_size=4,
            format="tokens",
            options={"sequence_length": SAMPLE_LENGTH},
            address=numbers,
        )
    assert int(refused.value.facts["num_bytes"]) > 65536
    with (
        Connection(parse_address(numbers)) as connection,
        pytest.raises(InvalidRequest, match=sentence),
    ):
        list(connection.index(pb.DatasetRef(name=long)))
    with (
        Loader("numbers", batch_size=4, job="j" * 70000, address=numbers) as loader,
        pytest.raises(InvalidRequest, match=sentence),
    ):
        next(loader)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(numbers: str) -> None:
    others = (
        Loader("half", batch_size=10, address=numbers),
        Loader("numbers", batch_size=20, address=numbers),
        Loader("numbers", batch_size=10, seed=1, address=numbers),
        Loader("numbers", batch_size=10, tail="drop", address=numbers),
    )
    strange = []
    for other in others:
        with other:
            strange.append(other.state_dict())
    with Loader("numbers", batch_size=10, address=numbers) as loader:
        expected = loader.state_dict()
        for state in (*strange, {"cursor": b"GYRE"}, {"cursor": "text"}, {"step": 3}, {}):
            with pytest.raises(CursorRejected):
                loader.load_state_dict(state)
            assert loader.state_dict() == expected
        assert loader.step == 0
        assert len(take(loader, 1)) == 1


def test_refusals_of_the_daemon_keep_their_class(numbers: str) -> None:
    with pytest.raises(UnknownDataset, match="wiki"):
        Loader("wiki", batch_size=10, address=numbers)
    with pytest.raises(InvalidRequest, match="whole batch of 1000"):
        Loader("numbers", batch_size=1000, tail="drop", address=numbers)


def test_a_corrupt_sample_is_an_error_after_all_batches_before_it(
    gyred: Any, tmp_path: Path
) -> None:
    with webdataset.TarWriter(str(tmp_path / "shard-000.tar")) as writer:
        for n in range(30):
            writer.write({"__key__": f"{n:03d}", "json": b"{" if n == 17 else b"{}"})
    dataset = {"uri": str(tmp_path / "shard-000.tar"), "format": "webdataset", "fields": ["json"]}
    daemon = gyred({"datasets": {"texts": dataset}})
    with Loader(
        "texts", batch_size=1, seed=1, address=daemon.address, prefetch_batches=30
    ) as loader:
        seen: list[int] = []
        with pytest.raises(CorruptSample, match=r"shard-000\.tar"):
            seen.extend(loader.step for _ in loader)
        assert loader.step == len(seen)
    with Connection(parse_address(daemon.address)) as connection:
        order = pb.OrderSpec(seed=1, global_batch_size=30)
        planned = connection.plan_step(
            pb.PlanStepRequest(dataset=pb.DatasetRef(name="texts"), order=order, world_size=1)
        )
    assert list(planned.sample_ids).index(17) == len(seen) > 3


def test_a_session_without_room_waits_and_then_fails(gyred: Any, numbers_file: Path) -> None:
    dataset = {
        "uri": str(numbers_file),
        "format": "tokens",
        "dtype": "int16",
        "sequence_length": SAMPLE_LENGTH,
    }
    daemon = gyred({"memory_budget": 400 << 10, "datasets": {"numbers": dataset}})

    def loader(batch_size: int) -> Loader:
        return Loader(
            "numbers", batch_size=batch_size, address=daemon.address, reattach_timeout_s=0.3
        )

    with (
        loader(3000) as hopeless,
        pytest.raises(Overloaded, match="640192 bytes, more than the daemon's memory_budget"),
    ):
        next(hopeless)
    with loader(10) as first, loader(10) as second:
        next(first)
        with pytest.raises(Overloaded, match=r"only \d+ are free.*gave up after 0\.\d s"):
            next(second)
        first.close()
        assert len(take(second, 5)) == 5


def test_the_younger_of_two_loaders_of_a_rank_takes_over(numbers: str) -> None:
    with Loader(
        "numbers", batch_size=10, address=numbers, job="train", prefetch_batches=1
    ) as older:
        take(older, 1)
        with Loader("numbers", batch_size=10, address=numbers, job="train") as younger:
            take(younger, 1)
            with pytest.raises(Fenced, match="taken over"):
                take(older, 10)
            with pytest.raises(Fenced):
                next(older)
            assert len(take(younger, 20)) == 20


@pytest.mark.parametrize(
    ("state", "error", "expected"),
    [
        (None, InvalidRequest, "state_dict is None; it must be a dict"),
        (3, InvalidRequest, "state_dict is 3"),
        (b"GYRE", InvalidRequest, "state_dict is b'GYRE'"),
        ("cursor", InvalidRequest, "state_dict is 'cursor'"),
        ([("cursor", b"0")], InvalidRequest, "it must be a dict"),
        ({1: 2, "cursor": b"0"}, InvalidRequest, "a key of state_dict is 1"),
        ({b"cursor": b"0"}, InvalidRequest, "a key of state_dict is b'cursor'"),
        ({}, CursorRejected, r"it has \[\]"),
        ({"step": 3}, CursorRejected, r"it has \['step'\]"),
        ({"cursor": None}, CursorRejected, "must be bytes"),
        ({"cursor": "0"}, CursorRejected, "must be bytes"),
        ({"cursor": 7}, CursorRejected, "must be bytes"),
        ({"cursor": b""}, CursorRejected, "must be bytes"),
        ({"cursor": bytearray(b"0")}, CursorRejected, "must be bytes"),
        ({"cursor": b"0" * 5000}, CursorRejected, "at most 4096"),
    ],
)
def test_what_is_no_state_is_refused_by_name(
    stub: StubDaemon, state: Any, error: type[Exception], expected: str
) -> None:
    with Loader("d", batch_size=BATCH_SIZE, address=stub.address) as loader:
        with pytest.raises(error, match=expected):
            loader.load_state_dict(state)
        assert loader.step == 0


@pytest.mark.parametrize(
    "epoch", [None, "1", b"1", 1.0, True, -1, 2**32, 1 << 9999, [1]], ids=lambda value: ""
)
def test_what_is_no_epoch_is_refused_by_name(stub: StubDaemon, epoch: Any) -> None:
    with (
        Loader("d", batch_size=BATCH_SIZE, address=stub.address) as loader,
        pytest.raises(InvalidRequest, match=r"epoch is .*; it must be"),
    ):
        loader.set_epoch(epoch)


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[StubDaemon]:
    with StubDaemon(tmp_path) as stub:
        yield stub
