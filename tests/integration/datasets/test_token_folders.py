"""Folders of token files through a real daemon, and how often their headers are read."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import InvalidRequest, ShardMissing
from gyre_client.transport.arguments import dataset_ref
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection

from tests.conftest import S3Server, StartDaemon
from tests.integration.datasets.token_sets import (
    IDS,
    LENGTH,
    Serve,
    epoch,
    refusals,
    serving,
    write_sets,
)
from tests.token_files import llm_c, megatron_idx


@pytest.fixture
def serve(gyred: StartDaemon, tmp_path: Path) -> Serve:
    """See `serving`."""
    return serving(gyred, tmp_path)


@pytest.mark.parametrize("suffix", ["bin", "tar"])
def test_a_folder_with_a_held_out_set_in_it_needs_a_pattern(
    serve: Serve, tmp_path: Path, suffix: str
) -> None:
    write_sets(tmp_path / "set", ["wiki_train_000", "wiki_train_001", "wiki_val_000"], suffix)
    options: dict[str, Any] = {"dtype": "uint16"} if suffix == "bin" else {"format": "webdataset"}
    if suffix == "tar":
        options["sequence_length"] = None
    for refused in refusals(serve("set", **options)):
        assert type(refused) is InvalidRequest
        assert "holds train (2 files, such as wiki_train_000" in str(refused)
        assert "and val (1 file, such as wiki_val_000" in str(refused)
        pattern = re.search(
            rf"Name (\S+/\*train\*\.{suffix}) or \S+/\*val\*\.{suffix}, "
            rf"or (\S+/\*\.{suffix}) for all",
            str(refused),
        )
        assert pattern
        uris = pattern.groups()
    for uri, num_shards in zip(uris, (2, 3), strict=True):
        with Connection(
            parse_address(serve("/" + uri.lstrip("/"), **options).address)
        ) as connection:
            assert connection.describe(dataset_ref("set"), 10.0).num_shards == num_shards


def test_a_folder_of_folders_says_which_there_are(serve: Serve, tmp_path: Path) -> None:
    write_sets(tmp_path / "set", ["train/0", "validation/0", "other/0"], "bin")
    for refused in refusals(serve("set", dtype="uint16")):
        assert type(refused) is ShardMissing
        assert "has the folders train, validation: name one of them, such as " in str(refused)
        assert str(refused).endswith(
            "set/train, or " + str(tmp_path / "set/*/*.bin") + " for all of them"
        )
    assert len(epoch(serve("set/train", dtype="uint16"))) == 300


def test_names_that_only_look_alike_are_one_set(serve: Serve, tmp_path: Path) -> None:
    write_sets(tmp_path / "set", ["trains-0", "constraint", "values", "train-1", "latest"], "bin")
    assert len(epoch(serve("set", dtype="uint16"))) == 1500


def test_headers_of_many_shards_are_kept_until_one_of_them_changes(
    serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "set").mkdir()
    for number in range(20):
        (tmp_path / f"set/{number:02}.bin").write_bytes(llm_c(IDS[:20].astype("<u2")))
    daemon = serve("set")
    with Connection(parse_address(daemon.address)) as connection:
        assert connection.describe(dataset_ref("set"), 10.0).num_samples == 40
    daemon.stop()
    index = daemon.config_path.parent / "index"
    assert sorted(path.suffix for path in index.iterdir()) == [".gyre-dataset", ".gyre-index"]
    daemon.restart()
    with Connection(parse_address(daemon.address)) as connection:
        assert connection.describe(dataset_ref("set"), 10.0).num_samples == 40
    daemon.stop()
    (tmp_path / "set/07.bin").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(1056))
    daemon.restart()
    for refused in refusals(daemon):
        assert "shard 07.bin holds no token ids: it looks like an image" in str(refused)


def test_an_index_that_is_replaced_alone_counts(serve: Serve, tmp_path: Path) -> None:
    """The ids stay, and documents end elsewhere; another job may serve windows of the same ids."""
    (tmp_path / "set").mkdir()
    for number in range(20):
        (tmp_path / f"set/{number:02}.bin").write_bytes(IDS[:50].astype("<u2").tobytes())
        (tmp_path / f"set/{number:02}.idx").write_bytes(megatron_idx([20, 30], 2, 8, [0, 1, 2]))
    daemon = serve("set", samples="documents", sequence_length=None)

    def lengths() -> list[int]:
        with Loader(
            "set", batch_size=1, order="sequential", epochs=1, address=daemon.address
        ) as it:
            return [len(batch["tokens"]) for batch in it]

    assert lengths() == [20, 30] * 20
    daemon.stop()
    (tmp_path / "set/07.idx").write_bytes(megatron_idx([10, 40], 2, 8, [0, 1, 2]))
    daemon.restart()
    assert lengths() == [20, 30] * 7 + [10, 40] + [20, 30] * 12


def test_object_storage_is_asked_once_for_each_head_and_not_again(
    s3_server: S3Server, serve: Serve
) -> None:
    s3_server.make_bucket("heads")
    for number in range(30):
        s3_server.put("heads", f"{number:02}.bin", llm_c((IDS[:200] + number).astype("<u2")))
    daemon = serve("s3://heads", storage=dict(s3_server.storage_settings))

    def gets() -> int:
        with Connection(parse_address(daemon.address)) as connection:
            connection.describe(dataset_ref("set"), 30.0)
        return s3_server.num_requests("GET", "/heads/")

    num_first = gets()  # some may have been sent twice, where the answer was late
    assert num_first >= 60, "the head of each shard, and the fingerprint's probe"
    daemon.stop()
    daemon.restart()
    assert 30 <= gets() - num_first < 60, "only the fingerprint's probes"
    assert np.array_equal(epoch(daemon)[:20], IDS[:200].reshape(-1, LENGTH))


def test_object_storage_has_megatron_files_and_held_out_sets_too(
    s3_server: S3Server, serve: Serve
) -> None:
    s3_server.make_bucket("sets")
    settings = {"storage": dict(s3_server.storage_settings), "cache": False}
    for name in ("train", "val"):
        s3_server.put("sets", f"data/{name}.bin", IDS.astype("<u2").tobytes())
        s3_server.put("sets", f"data/{name}.idx", megatron_idx([3000], 2, 8))
        s3_server.put("sets", f"parts/{name}/0.bin", IDS.astype("<u2").tobytes())
    for refused in refusals(serve("s3://sets/data", **settings)):
        assert (
            "Name s3://sets/data/*train*.bin or s3://sets/data/*val*.bin, or s3://sets/data/*.bin"
            in str(refused)
        )
    for refused in refusals(serve("s3://sets/parts", **settings)):
        assert "has the folders train, val: name one of them, such as s3://sets/parts/train" in str(
            refused
        )
    assert np.array_equal(
        epoch(serve("s3://sets/data/*train*.bin", **settings)), IDS.reshape(-1, LENGTH)
    )
    for refused in refusals(serve("s3://sets/parts/train", **settings)):
        assert "`dtype` is missing" in str(refused), "no index beside it"
