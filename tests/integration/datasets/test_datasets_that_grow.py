"""`append = true`: a job finishes its epoch over the old shards, and goes on with all of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader
from gyre_client.batches.batch import objects
from gyre_client.errors import ConfigError, CursorRejected, InvalidRequest
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

from tests.conftest import Daemon, StartDaemon
from tests.daemons import status

SIZES = {"a": 24, "b": 26, "c": 17, "d": 13, "e": 9}  # samples of each shard, in their order
G = 6
Batch = dict[str, Any]


class Growing:
    """A dataset on disk; each sample knows its id."""

    def __init__(self, folder: Path, suffix: str) -> None:
        self.folder, self.suffix = folder, suffix
        folder.mkdir()

    def add(self, names: str) -> None:
        """Writes these shards."""
        for name in names:
            first = sum(size for other, size in SIZES.items() if other < name)
            ids = np.arange(first, first + SIZES[name])
            path = self.folder / f"{name}.{self.suffix}"
            if self.suffix == "bin":
                path.write_bytes(np.repeat(ids, 4).astype(np.uint16).tobytes())
            elif self.suffix == "jsonl":
                path.write_text("".join(f"{json.dumps({'id': each})}\n" for each in ids.tolist()))
            else:
                pq.write_table(pa.table({"id": ids}), path, row_group_size=5)


def id_written(batch: Batch, suffix: str) -> list[int]:
    """What the samples of a batch say that they are."""
    if suffix == "bin":
        ids: list[int] = batch["tokens"][:, 0].tolist()
        return ids
    if suffix == "jsonl":
        return [each["id"] for each in objects(batch, "json")]
    return list(batch["id"].tolist())


def index(daemon: Daemon) -> pb.IndexProgress:
    with Connection(parse_address(daemon.address)) as connection:
        *_, last = connection.index(pb.DatasetRef(name="set"))
        return last


def loader(daemon: Daemon, rank: int = 0, world_size: int = 1, **arguments: Any) -> Loader:
    return Loader(
        "set",
        batch_size=G,
        rank=rank,
        world_size=world_size,
        address=daemon.address,
        seed=3,
        **arguments,
    )


def read(ranks: list[Loader], num_steps: int, suffix: str = "bin") -> list[int]:
    """The sample ids of the next global batches."""
    ids: list[int] = []
    for _ in range(num_steps):
        for rank in ranks:
            batch = next(rank)
            assert id_written(batch, suffix) == batch["sample_id"].tolist()
            ids += batch["sample_id"].tolist()
    return ids


@pytest.mark.parametrize(
    ("suffix", "table", "order"),
    [
        ("bin", {"format": "tokens", "dtype": "uint16", "sequence_length": 4}, "full"),
        ("jsonl", {"format": "jsonl"}, "full"),
        ("parquet", {"format": "parquet"}, "block"),
    ],
)
def test_the_new_shards_come_with_the_next_epoch(
    gyred: StartDaemon, tmp_path: Path, suffix: str, table: dict[str, Any], order: str
) -> None:
    data = Growing(tmp_path / "set", suffix)
    data.add("ab")
    config = {"datasets": {"set": {"uri": str(data.folder), "append": True, **table}}}
    daemon, other = gyred(config), gyred(config)
    loader(other).close()  # opens the dataset
    first = [loader(daemon, rank, 2, order=order) for rank in range(2)]
    ids = read(first, 5, suffix)
    state = first[0].state_dict()
    assert [each.state_dict() for each in first] == [state, state]
    assert [len(each) for each in first] == [9, 9]
    for each in first:
        each.close()

    data.add("cd")
    progress = index(daemon)
    assert progress.was_appended
    # another number of ranks; the last of them comes later than the others
    resumed = [loader(daemon, rank, 3, order=order) for rank in range(2)]
    for each in resumed:
        each.load_state_dict(state)
    late = loader(daemon, 2, 3, order=order)
    late.load_state_dict(state)
    resumed.append(late)
    assert {each.fingerprint for each in resumed} == {progress.fingerprint}
    assert [(each.num_samples, len(each)) for each in resumed] == [(80, 14)] * 3
    ids += read(resumed, 5, suffix)
    shown = status(daemon).sessions[0].stages
    assert [(each.first_epoch, each.num_samples) for each in shown] == [(0, 50), (1, 80)]
    saved = resumed[0].state_dict()
    with Connection(parse_address(daemon.address)) as connection:
        request = pb.PlanStepRequest(dataset=pb.DatasetRef(name="set"), stages=shown)
        request.order.CopyFrom(first[0]._request.order)
        request.step = 8  # it begins in epoch 0 and ends in epoch 1
        planned = connection.plan_step(request)
    assert (list(planned.sample_ids), planned.epoch) == (ids[48:54], 0)

    # a daemon that has not looked at the new shards says what to do
    with loader(other, order=order) as behind:
        with pytest.raises(CursorRejected, match=r"of 4 shards .* with 2; .*`gyre index` finds"):
            behind.load_state_dict(saved)
        index(other)
    with loader(other, order=order) as behind:
        behind.load_state_dict(saved)
        there = read([behind], 14, suffix)

    # a daemon that restarts while the job runs changes nothing: the job keeps its samples
    data.add("e")
    daemon.stop()
    daemon.restart()
    ids += read(resumed, 14, suffix)
    assert ids[-len(there) :] == there
    assert sorted(ids[:50]) == list(range(50))
    assert sorted(ids[50:130]) == list(range(80))
    assert [(each.step, each.epoch) for each in resumed] == [(24, 2)] * 3
    for each in resumed:
        each.close()


def test_what_does_not_fit_is_refused(gyred: StartDaemon, tmp_path: Path) -> None:
    data = Growing(tmp_path / "set", "bin")
    data.add("ab")
    table = {
        "uri": str(data.folder),
        "format": "tokens",
        "dtype": "uint16",
        "sequence_length": 4,
        "append": False,
    }
    daemon = gyred({"datasets": {"set": table}})
    with loader(daemon) as before:
        read([before], 2)
        plain = before.state_dict()

    data.add("c")
    index(daemon)
    with loader(daemon) as after, pytest.raises(CursorRejected, match="`append = true` in the"):
        after.load_state_dict(plain)

    # a state of before the key was set is good, where the daemon knows what it was of
    text = daemon.config_path.read_text()
    reloaded = daemon.reconfigure(text.replace('"append" = false', '"append" = true'))
    assert reloaded["changed"] == ["set"]
    with loader(daemon, 0, 2, job="pair") as zero:
        zero.load_state_dict(plain)
        read([zero], 1)
        assert (zero.num_samples, zero.step) == (67, 3)
        state = zero.state_dict()
        data.add("d")
        index(daemon)
        with loader(daemon, 1, 2, job="pair") as one:
            text = r"50 samples, 67 from epoch 1 on.*50 samples, 80 from epoch 1.*from one state"
            with pytest.raises(InvalidRequest, match=text):
                one.load_state_dict(plain)

    def altered() -> None:
        (data.folder / "b.bin").write_bytes(bytes(26 * 8))

    cases: list[tuple[Callable[[], Any], str]] = [
        ((data.folder / "a.bin").unlink, r"removed \(a.bin\)"),
        (lambda: data.add("a"), ""),
        (altered, r"added \(d.bin\) behind the others, which have other contents"),
    ]
    for change, text in cases:
        change()
        index(daemon)
        with loader(daemon) as later:
            if text:
                with pytest.raises(CursorRejected, match=text):
                    later.load_state_dict(state)
            else:
                later.load_state_dict(state)


@pytest.mark.parametrize(
    ("lands", "field"),
    [(("de", "fr", "at"), "land"), (("1", "2", "x"), "land"), (("de", "fr", ""), "land.present")],
)
def test_partitions_that_change_the_numbers_of_classes_are_refused(
    gyred: StartDaemon, tmp_path: Path, lands: tuple[str, str, str], field: str
) -> None:
    def add(day: int, land: str) -> None:
        folder = tmp_path / f"set/day={day}" / f"land={land or '__HIVE_DEFAULT_PARTITION__'}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": np.arange(G)}), folder / "0.parquet")

    add(1, lands[0])
    add(2, lands[1])
    daemon = gyred({"datasets": {"set": {"uri": str(tmp_path / "set"), "append": True}}})
    with loader(daemon) as first:
        next(first)
        state = first.state_dict()
    add(3, lands[1])
    index(daemon)
    with loader(daemon) as grown:
        grown.load_state_dict(state)
    add(4, lands[2])
    index(daemon)
    with loader(daemon) as other, pytest.raises(CursorRejected, match=f"the fields .*: {field}"):
        other.load_state_dict(state)


@pytest.mark.parametrize("order", ["full", "block"])
def test_a_shard_that_must_be_decoded_changes_blocks(
    gyred: StartDaemon, tmp_path: Path, order: str
) -> None:
    def add(name: str, compression: str | None) -> None:
        table = pa.table({"id": np.arange(24) + (24 if compression else 0)})
        options = pa.ipc.IpcWriteOptions(compression=compression)
        path = tmp_path / f"set/{name}.arrow"
        with pa.ipc.new_file(path, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=6)

    (tmp_path / "set").mkdir()
    add("a", None)
    daemon = gyred({"datasets": {"set": {"uri": str(tmp_path / "set"), "append": True}}})
    with loader(daemon, order=order) as first:
        ids = read([first], 2, "arrow")
        state = first.state_dict()
    add("b", "zstd")
    assert not index(daemon).was_appended
    with loader(daemon, order=order) as grown:
        if order == "block":
            with pytest.raises(CursorRejected, match="must be decoded, which changes the blocks"):
                grown.load_state_dict(state)
            return
        grown.load_state_dict(state)
        ids += read([grown], 10, "arrow")
    assert sorted(ids[:24]) == list(range(24))
    assert sorted(ids[24:]) == list(range(48))


def test_single_files_cannot_be_appended(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one")
    with pytest.raises(ConfigError, match="all its single files are one shard; leave `append` out"):
        Loader(tmp_path, format="files", options={"append": True}, batch_size=1)
