"""Faults in the data of a daemon: the error names the shard or the cursor, and what differs."""

import os
import subprocess
from pathlib import Path

import grpc
import pytest
import torch
import webdataset
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import (
    CorruptSample,
    CursorRejected,
    ShardMissing,
)
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import Daemon, StartDaemon
from tests.faults.served_tokens import TOKENS, read_some


def test_missing_shard_names_it(gyred: StartDaemon, token_files: Path) -> None:
    datasets = {
        "tokens": {"uri": str(token_files), **TOKENS},
        "gone": {"uri": str(token_files / "x-{0..2}.bin"), **TOKENS},
    }
    daemon = gyred({"datasets": datasets})
    with pytest.raises(ShardMissing, match=r"x-0\.bin"):
        Loader("gone", batch_size=4, address=daemon.address)
    assert read_some(daemon)


def test_a_shard_that_is_removed_or_replaced_is_named(
    gyred: StartDaemon, token_files: Path
) -> None:
    daemon = gyred({"datasets": {"tokens": {"uri": str(token_files), **TOKENS}}})
    assert main(["index", "tokens", "--checksums", "--address", daemon.address]) == 0
    shard, aside = token_files / "a.bin", token_files / "aside"
    wanted = read_some(daemon, 20)
    shard.rename(aside)
    with pytest.raises(ShardMissing, match=r"shard a\.bin does not exist") as caught:
        read_some(daemon, 20)
    assert caught.value.facts["shard"] == "a.bin"
    shard.write_bytes(aside.read_bytes())
    with pytest.raises(CorruptSample, match=r"shard a\.bin has changed") as replaced:
        read_some(daemon, 20)
    assert replaced.value.facts["shard"] == "a.bin"
    aside.rename(shard)
    assert read_some(daemon, 20) == wanted, "what comes back goes on to be served"
    shard.unlink()
    daemon.stop()
    daemon.restart()
    with Loader("tokens", batch_size=20, address=daemon.address) as loader:
        assert loader.num_samples == 200  # a folder without the shard is another dataset


def test_a_truncated_shard_is_named(gyred: StartDaemon, token_files: Path) -> None:
    daemon = gyred(
        {"prefetch_batches": 1, "datasets": {"tokens": {"uri": str(token_files), **TOKENS}}}
    )
    with Loader("tokens", batch_size=20, seed=1, address=daemon.address) as loader:
        next(iter(loader))
        os.truncate(token_files / "a.bin", 100)
        with pytest.raises(CorruptSample, match=r"a\.bin") as caught:
            for _ in range(30):
                next(iter(loader))
    assert caught.value.facts["shard"] == "a.bin"
    with pytest.raises(CorruptSample, match=r"a\.bin"):
        read_some(daemon, 15)
    # indexed again it is another dataset, and valid
    with identified_channel(daemon.address) as channel:
        request = pb.IndexDatasetRequest(dataset=pb.DatasetRef(name="tokens"))
        indexed = list(pb_grpc.LoaderStub(channel).IndexDataset(request, timeout=120))
    assert {each.shard: each.change for each in indexed} == {
        "a.bin": pb.SHARD_CHANGE_CHANGED,
        **dict.fromkeys(("b.bin", "c.bin", "d.bin"), pb.SHARD_CHANGE_KEPT),
    }
    assert read_some(daemon, 15)


def test_a_corrupt_sample_fails_its_step_and_is_named(gyred: StartDaemon, tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "x.tar")) as writer:
        for index in range(64):
            writer.write({"__key__": f"{index:03}", "json": b"{]" if index == 40 else b"{}"})
    daemon = gyred({"datasets": {"x": {"uri": str(tmp_path / "x.tar"), "format": "webdataset"}}})
    sound = []
    with Loader("x", batch_size=4, seed=3, address=daemon.address) as loader:
        with pytest.raises(
            CorruptSample,
            match=r"sample 40 of dataset `x` \(shard x\.tar, byte \d+\) is corrupt: field json",
        ) as caught:
            for batch in loader:
                sound += batch["sample_id"].tolist()
        cursor = loader.state_dict()
    assert caught.value.facts["sample_id"] == "40"
    with identified_channel(daemon.address) as channel:
        step = len(sound) // 4
        order = pb.OrderSpec(seed=3, global_batch_size=4)
        request = pb.PlanStepRequest(dataset=pb.DatasetRef(name="x"), order=order, step=step)
        assert 40 in pb_grpc.LoaderStub(channel).PlanStep(request, timeout=120).sample_ids
    assert cursor["cursor"]


def test_cursor_of_another_order_says_what_differs(tokens: Daemon) -> None:
    with Loader("tokens", batch_size=20, seed=1, address=tokens.address) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for arguments, difference in (
        ({"batch_size": 20, "seed": 2}, "the seed is 1 there and 2 here"),
        ({"batch_size": 10, "seed": 1}, "the global batch size is 20 there and 10 here"),
        ({"batch_size": 20, "seed": 1, "tail": "drop"}, "the tail is wrap there and drop here"),
    ):
        with (
            Loader("tokens", address=tokens.address, **arguments) as other,
            pytest.raises(CursorRejected, match=difference),
        ):
            other.load_state_dict(state)
    assert read_some(tokens)


def test_cursor_of_changed_data_is_refused(gyred: StartDaemon, token_files: Path) -> None:
    daemon = gyred({"datasets": {"tokens": {"uri": str(token_files), **TOKENS}}})
    with Loader("tokens", batch_size=20, address=daemon.address) as loader:
        next(iter(loader))
        state = loader.state_dict()
    daemon.stop()
    content = bytearray((token_files / "b.bin").read_bytes())
    content[len(content) // 2] ^= 1  # same name, same size
    (token_files / "b.bin").write_bytes(content)
    daemon.restart()
    with (
        Loader("tokens", batch_size=20, address=daemon.address) as loader,
        pytest.raises(CursorRejected, match="other data"),
    ):
        loader.load_state_dict(state)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk_for_the_index(gyred: StartDaemon, tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "x.tar")) as writer:
        for index in range(2000):
            writer.write({"__key__": f"{index:05}", "cls": index})
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "tmpfs", str(small)],
        capture_output=True,
        check=False,
    ).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        daemon = gyred(
            {
                "index_dir": str(small),
                "datasets": {"x": {"uri": str(tmp_path / "x.tar"), "format": "webdataset"}},
            }
        )
        # the daemon serves from an index in memory
        with Loader("x", batch_size=10, address=daemon.address) as loader:
            seen = torch.cat([batch["sample_id"] for batch in loader])
        assert sorted(seen.tolist()) == list(range(2000))
        assert [
            event["shard"] for event in daemon.events() if event["event"] == "index not stored"
        ] == ["x.tar"]
        with (
            identified_channel(daemon.address) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            list(
                pb_grpc.LoaderStub(channel).IndexDataset(
                    pb.IndexDatasetRequest(dataset=pb.DatasetRef(name="x")), timeout=120
                )
            )
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "No space left on device" in str(caught.value.details())
        # no partial file stays; what is known of the dataset as a whole is small
        assert {path.suffix for path in small.iterdir()} <= {".gyre-dataset"}
        daemon.stop()
    finally:
        subprocess.run(["umount", str(small)], check=True)
