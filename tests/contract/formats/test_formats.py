"""Every format, and the example in the documentation of the seam, under the contract."""

import io
import re
import sys
import textwrap
from typing import Any, ClassVar

import numpy as np
import pytest
import webdataset
from gyre_daemon.datasets.formats import Format, base
from gyre_daemon.datasets.known_formats import FORMATS, PATTERNS, included_formats
from gyre_daemon.errors import ConfigError

from tests.contract.formats import (
    test_arrayrecord,
    test_arrow,
    test_chunked_formats,
    test_coco,
    test_more_formats,
    test_parquet_columns,
    test_single_files,
    test_yolo,
)
from tests.contract.formats.compressed_shards import compressed
from tests.contract.formats.format_contract import FormatContract, Sample, inspect, listed
from tests.shard_formats import shard_format


class TestTokens(FormatContract):
    name = "tokens"
    options: ClassVar = {"sequence_length": 16, "stride": 10, "dtype": "uint16"}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        generator = np.random.default_rng(0)
        shards = [
            generator.integers(0, 1 << 16, count, np.uint16).astype("<u2").tobytes()
            for count in (500, 15, 16, 301)
        ]
        samples = [
            {"tokens": data[begin : begin + 32]}
            for data in shards
            for begin in range(0, len(data), 20)
            if begin + 32 <= len(data)
        ]
        return shards, list(samples)

    def empty_shard(self) -> bytes:
        return bytes(30)

    def damaged_shard(self) -> bytes:
        return bytes(101)


class TestWebdataset(FormatContract):
    name = "webdataset"
    options: ClassVar = {"fields": ["txt", "json", "cls", "npy", "bin"]}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        generator = np.random.default_rng(0)
        shards, samples = [], []
        for number, count in enumerate((20, 1, 35)):
            stream = io.BytesIO()
            with webdataset.TarWriter(stream, encoder=False) as writer:
                for index in range(count):
                    array = io.BytesIO()
                    np.save(array, generator.integers(0, 9, (2, 3)))
                    fields = {
                        "txt": b"word " * int(generator.integers(100)),
                        "json": b'{"index": %d}' % index,
                        "cls": b"%d" % index,
                        "npy": array.getvalue(),
                        "bin": generator.bytes(int(generator.integers(2000))),
                        "other": b"not asked for",
                    }
                    writer.write({"__key__": f"{number}/{index:04}", **fields})
                    samples.append({name: fields[name] for name in self.options["fields"]})
            shards.append(stream.getvalue())
        return shards, list(samples)

    def empty_shard(self) -> bytes:
        return bytes(10_240)

    def damaged_shard(self) -> bytes:
        data = self.shards()[0][0]
        return data[: len(data) // 2]


class TestProbedTokens(TestTokens):
    """Without `header_bytes` and with headers, so that the shards' own heads say the dtype."""

    options: ClassVar = {"sequence_length": 16, "stride": 10}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        flat, samples = super().shards()
        return [self._with_header(data) for data in flat], samples

    def empty_shard(self) -> bytes:
        return self._with_header(bytes(30))

    def damaged_shard(self) -> bytes:
        return self._with_header(bytes(100))[:-2]

    def _with_header(self, data: bytes) -> bytes:
        stream = io.BytesIO()
        np.save(stream, np.frombuffer(data, "<u2"))
        return stream.getvalue()


class TestExample(FormatContract):
    """The format that `formats/base.py` shows is a complete one."""

    name = "lines"
    options: ClassVar = {}

    def format(self, **options: Any) -> Format:
        text = base.__doc__ or ""
        namespace: dict[str, Any] = {}
        exec(textwrap.dedent(text[text.index("    from dataclasses") :]), namespace)
        example: Format = namespace["LINES"].make(options, "the example")
        return example

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        shards = [b"one\ntwo\n", "drei\nvier fünf\n\n".encode(), b"last, without an end"]
        lines = [line for shard in shards for line in shard.splitlines(keepends=True)]
        return shards, [{"line": line} for line in lines]

    def empty_shard(self) -> bytes:
        return b""

    def damaged_shard(self) -> bytes:
        return b"\xff\xff\n"

    def test_unknown_options_are_refused(self) -> None:
        """The example has no options."""


@pytest.mark.parametrize(
    ("name", "options", "library", "extra"),
    [
        ("parquet", {}, "pyarrow", "arrow"),
        ("arrow", {}, "pyarrow", "arrow"),
        ("arrayrecord", {}, "array_record", "records"),
        ("tfrecord", {}, "google_crc32c", "records"),
        ("jsonl", {}, "zstandard", "records"),
        ("jsonl", {"columns": ["*"]}, "zstandard", "records"),
        ("mds", {}, "zstandard", "records"),
    ],
)
def test_a_library_that_is_missing_is_named_by_its_extra(
    name: str,
    options: dict[str, Any],
    library: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no shard is called corrupt."""
    shard = compressed(b"{}\n")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=re.escape(f'pip install "gyre-ml[{extra}]"')):
        inspect(shard_format(name, **options), [shard])


def test_every_format_is_under_the_contract() -> None:
    modules = (
        test_arrayrecord,
        test_arrow,
        test_more_formats,
        test_chunked_formats,
        test_coco,
        test_parquet_columns,
        test_single_files,
        test_yolo,
    )
    more = (each for its in modules for each in vars(its).values() if isinstance(each, type))
    tested = {each.name for each in more if hasattr(each, "shards") and hasattr(each, "name")}
    known = {*FORMATS, *included_formats()}
    assert tested | {TestTokens.name, TestWebdataset.name, "tsv"} == known


def test_the_table_has_the_patterns_of_the_classes() -> None:
    assert {name: entry.pattern for name, entry in FORMATS.items()} == PATTERNS


def test_an_empty_cell_in_a_column_of_numbers_is_no_number() -> None:
    data = [b'a,n,x\n1,1,0.5\n2,,1\n3,"",2\n', b"a,n,x\n4,4,3\n"]
    dataset_format = shard_format("csv", types={"n": "int64", "x": "float64"})
    index = dataset_format.assemble(listed(data), inspect(dataset_format, data))
    assert [spec.name for spec in index.fields] == ["a", "n", "x", "n.present"]
    its = index.locate(np.arange(4))
    assert its.indexed[0].tolist() == [True, False, False, True]
    assert its.absent is not None
    assert its.absent[:, 1].tolist() == [False, True, True, False]
    whole = dataset_format.assemble(listed(data[1:]), inspect(dataset_format, data[1:]))
    assert [spec.name for spec in whole.fields] == ["a", "n", "x"]
