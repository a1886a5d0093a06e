"""Folders that other libraries wrote: read as their own files say, or refused by name."""

import json
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.checks import CorruptReports
from gyre_daemon.datasets.formats.tokens import read_head
from gyre_daemon.datasets.indexing.indexer import Indexer
from gyre_daemon.datasets.indexing.shard_lists import _RECORDS
from gyre_daemon.datasets.indexing.shards import OpeningDataset
from gyre_daemon.datasets.indexing.unpacked import UnpackedShards
from gyre_daemon.datasets.sidecars import SidecarStore
from gyre_daemon.errors import CorruptSample, GyreError, InvalidRequest, ShardMissing
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeServer

from benchmarks.loader.mosaic import streaming
from tests.conftest import S3Server
from tests.contract.places import LocalPlace, Place, S3Place, openers, run


def numbers() -> pa.Table:
    return pa.table({"n": [1, 2]})


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, s3_server: S3Server, tmp_path: Path) -> Place:
    return LocalPlace(tmp_path / "set") if request.param == "local" else S3Place(s3_server)


def opened(uri: str, settings: Mapping[str, Any], name: str, options: Any) -> OpeningDataset:
    """A dataset as it is listed, before its shards are scanned."""
    config = DatasetConfig(uri, name, options, storage=dict(settings))

    async def begin() -> OpeningDataset:
        with ThreadPoolExecutor(2) as threads, closing(ComputeServer()) as server:
            opener = StorageOpener(FairExecutor(threads, 2), EndpointOptions(16, 10.0), Metrics())
            openers.append(opener)
            folders = UnpackedShards(Path("/"), 0), None, CorruptReports(Path("/"))
            indexer = Indexer(opener, SidecarStore("", Path("/")), *folders, server)
            try:
                return await indexer.begin(None, config)
            finally:
                indexer.close()

    return run(begin())


def listing(place: Place, below: str = "", name: str = "", **options: Any) -> tuple[str, list[str]]:
    """The format of a dataset, and its shards."""
    found = opened(place.root + below, place.settings, name, options)
    return found.config.format, [shard.name for shard in found.source.shards]


def put_folder(place: Place, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            place.put(path.relative_to(folder).as_posix(), path.read_bytes())


def test_of_a_saved_dataset_only_the_files_of_its_state_count(place: Place, tmp_path: Path) -> None:
    import datasets

    saved = tmp_path / "saved"
    datasets.Dataset(numbers()).save_to_disk(saved, num_shards=2)
    put_folder(place, saved)
    wanted = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for copy in ("cache-0123456789abcdef.arrow", "tmp1.arrow"):
        place.put(copy, (saved / wanted[0]).read_bytes())
    for name in ("", "arrow"):
        assert listing(place, name=name) == ("arrow", wanted)
    assert listing(place, "/data-*.arrow") == ("arrow", wanted)
    assert listing(place, "/cache-0123456789abcdef.arrow")[1] == ["cache-0123456789abcdef.arrow"]
    with pytest.raises(InvalidRequest, match=r"state\.json does not list cache-0123.*Name the f"):
        listing(place, "/*.arrow")
    with pytest.raises(InvalidRequest, match=r"of the format arrow \(got jsonl\)"):
        listing(place, name="jsonl")


@pytest.mark.parametrize("name", ["state.json", "index.json", "dataset_dict.json"])
def test_a_damaged_description_is_refused(name: str, place: Place) -> None:
    place.put("a.arrow", b"")
    place.put(name, b'{"_data_files": [{"fil')
    with pytest.raises(InvalidRequest, match=rf"/{name} is damaged .*Restore it"):
        listing(place)
    place.put(name, b'\xef\xbb\xbf{"version": 2}')
    assert listing(place) == ("arrow", ["a.arrow"])


def test_a_dataset_dict_names_the_folders_of_its_splits(place: Place, tmp_path: Path) -> None:
    import datasets

    saved = tmp_path / "saved"
    split = datasets.Dataset(numbers())
    datasets.DatasetDict(train=split, test=split).save_to_disk(saved)
    put_folder(place, saved)
    with pytest.raises(InvalidRequest, match=f"Name one: {place.root}/train or {place.root}/test"):
        listing(place)
    assert listing(place, "/test") == ("arrow", ["data-00000-of-00001.arrow"])


def test_copies_in_the_cache_of_hugging_face_are_left_out(place: Place) -> None:
    for name in ("dataset_info.json", "set-train.arrow", "cache-0123456789abcdef.arrow"):
        place.put(name, b"{}")
    assert listing(place) == ("arrow", ["set-train.arrow"])
    place.put("set-test.arrow", b"")
    with pytest.raises(InvalidRequest, match="several datasets"):
        listing(place)


def write_mds(folder: Path, values: list[int], compression: str | None = None) -> None:
    with streaming.MDSWriter(
        out=str(folder), columns={"x": "int"}, compression=compression, size_limit=60, exist_ok=True
    ) as writer:
        for value in values:
            writer.write({"x": value})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # `merge_index`
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_shards_of_several_mds_writers_are_those_of_the_merged_index(
    compression: str | None, place: Place, tmp_path: Path
) -> None:
    for writer in range(2):
        write_mds(tmp_path / "out" / str(writer), [1, 2, 3], compression)
    streaming.base.util.merge_index(str(tmp_path / "out"), keep_local=True)
    put_folder(place, tmp_path / "out")
    index = json.loads((tmp_path / "out/index.json").read_bytes())
    kind = "zip_data" if compression else "raw_data"
    wanted = [shard[kind]["basename"] for shard in index["shards"]]
    assert len(wanted) > 2
    place.put("0/shard.00099.mds", b"")
    assert listing(place) == listing(place, "/index.json") == ("mds", wanted)
    with pytest.raises(InvalidRequest, match=r"does not list (0/)?shard\.00099\.mds"):
        listing(place, "/*/*.mds*")


def test_an_mds_cache_that_keeps_shards_decompressed_is_read(tmp_path: Path) -> None:
    write_mds(tmp_path / "zip", [1, 2], "zstd")
    write_mds(tmp_path / "raw", [1, 2])
    place = LocalPlace(tmp_path / "set")
    put_folder(place, tmp_path / "raw")
    place.put("index.json", (tmp_path / "zip/index.json").read_bytes())
    index = json.loads((tmp_path / "zip/index.json").read_bytes())
    wanted = [shard["raw_data"]["basename"] for shard in index["shards"]]
    assert listing(place) == ("mds", wanted)


def test_other_streaming_datasets_are_refused(tmp_path: Path) -> None:
    with streaming.CSVWriter(out=str(tmp_path / "xsv"), columns={"x": "int"}) as writer:
        writer.write({"x": 1})
    with pytest.raises(InvalidRequest, match="MosaicML Streaming in its format 'csv'"):
        listing(LocalPlace(tmp_path / "xsv"))
    write_mds(tmp_path / "br", [1], "br")
    with pytest.raises(InvalidRequest, match="with the compression 'br'"):
        listing(LocalPlace(tmp_path / "br"))


def test_copies_without_a_description_are_left_out(place: Place) -> None:
    copy, part = "cache-0123456789abcdef.arrow", "cache-fedcba9876543210_00001_of_00002.arrow"
    for name in ("data-00000-of-00001.arrow", "cache-ours.arrow", copy, part):
        place.put(name, b"{}")
    wanted = ["cache-ours.arrow", "data-00000-of-00001.arrow"]
    assert listing(place) == ("arrow", wanted)
    with pytest.raises(InvalidRequest, match=f"the library does not list {copy}"):
        listing(place, "/*.arrow")
    place.put(f"copies/{copy}", b"{}")
    assert listing(place, "/copies") == ("arrow", [copy])


@pytest.mark.parametrize(
    ("files", "name", "sentence"),
    [
        (["_delta_log/00000000000000000000.json", "a.parquet"], "", "is a Delta Lake table"),
        (["_delta_log/00000000000000000000.json", "a.parquet"], "parquet", "is a Delta Lake table"),
        ([".hoodie/hoodie.properties", "a.parquet"], "", "is a Hudi table"),
        (["_spark_metadata/0", "a.parquet"], "", "is the output of a stream of Spark"),
        (["metadata/v1.metadata.json", "a.parquet"], "", "is an Iceberg table"),
        (["metadata/v1.metadata.json.gz", "a.parquet"], "", "is an Iceberg table"),
        ([".hoodie_partition_metadata", "a.parquet"], "", "is a part of a Hudi table"),
    ],
)
def test_tables_whose_log_says_which_files_count_are_refused(
    files: list[str], name: str, sentence: str, place: Place
) -> None:
    for file in files:
        place.put(file, b"{}")
        place.put(f"outer/day=1/{file}", b"{}")
        place.put(f"outer/{file}", b"{}")
    for below in ("", "/*.parquet", "/outer/day=1", "/outer/day=1/*.parquet", "/outer/*/*.parquet"):
        with pytest.raises(InvalidRequest, match=sentence):
            listing(place, below, name)
    assert listing(place, "/a.parquet") == ("parquet", ["a.parquet"])


def test_a_folder_with_metadata_of_another_kind_is_no_table(place: Place) -> None:
    place.put("metadata/notes.json", b"{}")
    place.put("a.parquet", b"PAR1")
    assert listing(place) == ("parquet", ["a.parquet"])


def litdata_chunk(items: list[bytes]) -> bytes:
    """A chunk as litdata's `BinaryWriter` writes it: number of items, offsets, items."""
    sizes = [0, *(len(item) for item in items)]
    offsets = np.cumsum(sizes, dtype=np.uint32) + np.uint32(4 * len(sizes) + 4)
    return np.uint32(len(items)).tobytes() + offsets.astype("<u4").tobytes() + b"".join(items)


def test_chunks_of_litdata_are_no_token_ids(place: Place) -> None:
    chunk = litdata_chunk([np.arange(4, dtype=np.uint16).tobytes()] * 4)
    listed = {"chunks": [{"chunk_bytes": len(chunk), "filename": "chunk-0-0.bin"}], "config": {}}
    place.put("chunk-0-0.bin", chunk)
    place.put("index.json", json.dumps(listed).encode())
    options = {"dtype": "uint16", "sequence_length": 4}
    for below in ("", "/chunk-*.bin"):
        with pytest.raises(InvalidRequest, match="is a dataset that LitData optimized"):
            listing(place, below, "tokens", **options)


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (litdata_chunk([b"abcd"] * 3), "a chunk of LitData"),
        (litdata_chunk([b"abcd"] * 3000), "a chunk of LitData"),
        (b"LITPKDS" + bytes(17), "a chunk of lit-gpt"),
        (struct.pack("<HHIQQ", 2, 3, 8 << 20, 50_000, 24 << 20) + bytes(40), "a dataset of ffcv"),
        (b"\x02\0\0\0\x20\0\0\0\x28\0\0\0\x30\0\0\0" + b"{" + bytes(31), "a shard of MDS"),
    ],
)
def test_headers_of_other_packers_are_no_token_ids(head: bytes, what: str) -> None:
    with pytest.raises(CorruptSample, match=what):
        read_head(Shard("0.bin", len(head), "1"), head[:4096])


def test_the_parquet_files_of_a_litdata_index_are_read(place: Place) -> None:
    listed = {"chunks": [{"chunk_bytes": 4, "filename": f"{name}.parquet"} for name in "ba"]}
    place.put("index.json", json.dumps(listed | {"config": {}}).encode())
    for name in "abc":
        place.put(f"{name}.parquet", b"PAR1")
    assert listing(place) == ("parquet", ["b.parquet", "a.parquet"])


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (("a.parquet", "._a.parquet", "_b.parquet", ".a.parquet.crc", "_SUCCESS"), "a.parquet"),
        (("a.txt", "README.txt", "readme.txt", "LICENSE.txt", "md5sums.txt"), "a.txt"),
        (("a.txt", "SHA256SUMS.txt", "sha256sums.txt", "checksums.txt"), "a.txt"),
        (("a.jsonl", "meta.json", "dataset_infos.json"), "a.jsonl"),
        (("a.tar", "index.json"), "a.tar"),
    ],
)
def test_files_next_to_shards_are_left_out(
    files: tuple[str, ...], wanted: str, place: Place
) -> None:
    for name in files:
        place.put(name, b"{}")
    found, shards = listing(place)
    assert shards == [wanted]
    assert listing(place, name=found)[1] == [wanted]


LINES = b'{"a":1}\n{"a":2}\n'
RECORDS = b'[\n {"a": 1},\n {"a": 2}\n]'


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"data.json": RECORDS, "dataset_infos.json": b"{}", "README.md": b""}, ["data.json"]),
        (
            {"0.json": b'{"a":1}\n{"a":2}\n', "1.json": b"\xef\xbb\xbf" + RECORDS},
            ["0.json", "1.json"],
        ),
        ({"c4-train.00000-of-00001.json.zst": b""}, ["c4-train.00000-of-00001.json.zst"]),
    ],
)
def test_json_with_records_is_found(
    files: dict[str, bytes], wanted: list[str], place: Place
) -> None:
    for name, data in files.items():
        place.put(name, data)
    assert listing(place, name="jsonl") == ("jsonl", wanted)
    if not wanted[0].endswith(".zst"):
        assert listing(place) == ("jsonl", wanted)


@pytest.mark.parametrize(
    "name", ["dataset_infos.json", "dataset_info.json", "meta.json", "config.json"]
)
@pytest.mark.parametrize("data", [b'{"splits": {"train": {"num_examples": 2}}}', RECORDS, LINES])
def test_metadata_above_the_folders_of_the_data_is_no_data(
    data: bytes, name: str, place: Place
) -> None:
    place.put(name, data)
    place.put("train/0.parquet", b"PAR1")
    if name.startswith("dataset_info"):
        assert listing(place) == ("parquet", ["0.parquet"])
        return
    with pytest.raises(ShardMissing, match=r"it has the folders train: name one of them, such as"):
        listing(place)


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_metadata_of_image_folders_is_read_if_it_is_named(name: str, place: Place) -> None:
    place.put(name, b"file_name\n0.png\n")
    place.put("train/0.png", b"")
    with pytest.raises(InvalidRequest, match=rf'/{name} says more of files.*format="files"'):
        listing(place)
    assert listing(place, f"/{name}")[1] == [name]


def test_an_array_without_records_is_a_shard(place: Place) -> None:
    place.put("a.json", b"[]")
    place.put("b.json", RECORDS)
    assert listing(place) == ("jsonl", ["a.json", "b.json"])


def test_lists_of_tar_shards_are_those_of_their_folder(place: Place) -> None:
    for name in "abc":
        place.put(f"{name}.tar", b"")
    listed = [{"url": f"{name}.tar", "nsamples": 1} for name in "ba"]
    table = {"__kind__": "wids-shard-index-v1", "shardlist": listed}
    place.put("index.json", json.dumps(table).encode())
    assert listing(place) == listing(place, "/index.json") == ("webdataset", ["b.tar", "a.tar"])


def test_a_saved_selection_is_refused(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    state = {"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "b"}]}
    place.put("state.json", json.dumps(state).encode())
    with pytest.raises(InvalidRequest, match=r"selects rows of its files.*flatten_indices"):
        listing(place)


def test_white_space_in_a_list_is_looked_at_once() -> None:
    """Not once for each line, which would take hours."""
    assert not _RECORDS.match(b"{}" + b" \n" * (1 << 22))
    assert _RECORDS.match(b"{}" + b" \r\n" * (1 << 16) + b'\t{"a": 1}')


@pytest.mark.parametrize("name", ["../a.mds", "/etc/a.mds", "s3://other/a.mds", "*.mds"])
def test_lists_do_not_leave_their_folder(name: str, tmp_path: Path) -> None:
    shard = {"format": "mds", "samples": 1, "raw_data": {"basename": name, "bytes": 1}}
    LocalPlace(tmp_path).put("index.json", json.dumps({"version": 2, "shards": [shard]}).encode())
    with pytest.raises(GyreError, match="which is no path below its own folder"):
        listing(LocalPlace(tmp_path))
