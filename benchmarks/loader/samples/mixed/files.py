"""The documents in files that several loaders read. Each is written once in a folder."""

import io
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.loader.samples.mixed.documents import NAMES, shards, tokens_of


def write_parquet(folder: Path) -> None:
    """`NAME/SHARD.parquet`, with the fields `id` and `tokens`."""
    for source, name in enumerate(NAMES):
        if (folder / name).exists():
            continue
        (folder / name).mkdir()
        for shard, ids in shards(source):
            columns = {"id": list(ids), "tokens": [tokens_of(each) for each in ids]}
            types = pa.schema({"id": pa.int64(), "tokens": pa.list_(pa.int32())})
            pq.write_table(pa.table(columns, types), folder / name / f"{shard}.parquet")


def write_tars(folder: Path) -> None:
    """`tar-NAME/SHARD.tar`, with a member `ID.txt` of each document that has its number."""
    for source, name in enumerate(NAMES):
        if (folder / f"tar-{name}").exists():
            continue
        (folder / f"tar-{name}").mkdir()
        for shard, ids in shards(source):
            with tarfile.open(folder / f"tar-{name}/{shard}.tar", "w") as file:
                for each in ids:
                    data = str(each).encode()
                    member = tarfile.TarInfo(f"{each:06d}.txt")
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
