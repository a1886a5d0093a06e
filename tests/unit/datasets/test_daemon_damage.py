"""Damaged samples: found in bytes, kept in arrays that may be forged, limited, and reported."""

import asyncio
import io
import json
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from gyre_daemon.config import parse_dataset
from gyre_daemon.datasets.checks import (
    MAX_LINES,
    CorruptRecord,
    CorruptReports,
    check_limit,
)
from gyre_daemon.datasets.formats.base import FieldSpec
from gyre_daemon.datasets.shard_worker import Damage, ShardFields, from_arrays, to_arrays
from gyre_daemon.errors import ConfigError, CorruptSample

from tests.unseekable import Unseekable

JSON = FieldSpec("json", np.dtype(np.uint8), (), ragged=True, codec="json")
NUMBER = FieldSpec("cls", np.dtype("<i8"), (), ragged=False, codec="integer")
GAP = 200_000  # beyond what is read at once


def shard_of(rows: list[tuple[bytes, bytes]]) -> tuple[bytes, ShardFields]:
    """Samples of two fields, the number first, with gaps between them."""
    data, starts, sizes = b"", [], []
    for document, number in rows:
        starts.append([len(data) + len(number) + GAP, len(data)])
        sizes.append([len(document), len(number)])
        data += number + bytes(GAP) + document
    size = np.array(sizes)
    reserved = np.where([True, False], size, 8)
    skipped = np.zeros(size.shape, np.bool_)
    return data, ShardFields((JSON, NUMBER), np.array(starts), size, reserved, skipped)


@pytest.mark.parametrize("kind", [io.BytesIO, Unseekable])
def test_each_damaged_sample_is_found_once_with_its_offset(kind: type[BinaryIO]) -> None:
    data, fields = shard_of(
        [(b'{"a": 1}', b"7"), (b'{"a": ', b"8"), (b"[]", b"x"), (b"\xff", b"y"), (b"3", b"9")]
    )
    damages = from_arrays(fields.run("a.tar", kind(data)), 5)  # type: ignore[call-arg]
    assert [each.sample for each in damages] == [1, 2, 3]
    assert [data[each.offset : each.offset + 1] for each in damages] == [b"{", b"x", b"y"]
    assert "field json" in damages[0].reason
    assert "no decimal number" in damages[1].reason
    fields.skipped[1:4] = True
    assert not from_arrays(fields.run("a.tar", kind(data)), 5)  # type: ignore[call-arg]


def test_a_shard_that_ends_inside_a_sample_is_corrupt() -> None:
    data, fields = shard_of([(b"[1, 2, 3]", b"7")])
    with pytest.raises(CorruptSample, match=f"ends at byte {len(data) - 1}"):
        fields.run("a.tar", io.BytesIO(data[:-1]))


def test_arrays_of_damage_survive_and_forged_ones_are_refused() -> None:
    damages = [Damage(2, 20, "a"), Damage(5, 50, "\x1b[2J" * 200)]
    assert from_arrays(to_arrays(damages), 6)[0] == damages[0]
    for forged in (
        [Damage(5, 1, ""), Damage(2, 2, "")],
        [Damage(6, 1, "")],
        [Damage(-1, 1, "")],
        [Damage(1, -1, "")],
    ):
        with pytest.raises(ValueError, match="damaged"):
            from_arrays(to_arrays(forged), 6)
    arrays = dict(to_arrays(damages))
    for reasons in (b"[1]", b"{", b"\xff"):
        with pytest.raises(ValueError, match="reasons"):
            from_arrays(arrays | {"reasons": np.frombuffer(reasons, np.uint8)}, 6)


def records(number: int) -> list[CorruptRecord]:
    return [CorruptRecord("a.tar", 512 * each, each, "bad") for each in range(number)]


@pytest.mark.parametrize(
    ("number", "limit"), [(3, 3), (0, 0), (10, 0.1), (10, 0.10001), (50, 0.5), (50, 99)]
)
def test_as_many_as_allowed_are_replaced(number: int, limit: float) -> None:
    check_limit("wiki", records(number), 100, limit)
    with pytest.raises(
        CorruptSample, match=rf"{number + 1} corrupt samples of 100.*allows {number}"
    ):
        check_limit("wiki", records(number + 1), 100, limit)


def test_a_report_is_private_printable_and_bounded(tmp_path: Path) -> None:
    hostile = CorruptRecord("\x1b[2J.tar", 7, 3, "\u202edab\n" * 1000)
    reports = CorruptReports(tmp_path / "reports")
    path = asyncio.run(reports.write("../../etc/passwd", "x", [hostile] * (MAX_LINES + 5)))
    assert path.parent == tmp_path / "reports"
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_bytes()
    assert not text.translate(None, bytes(range(32, 127)) + b"\n")
    *lines, last = map(json.loads, text.splitlines())
    assert len(lines) == MAX_LINES
    assert last == {"num_left_out": 5}
    assert lines[0]["sample_id"] == 3
    assert lines[0]["shard"] == "\\x1b[2J.tar"
    assert len(text) < 12 << 20
    assert asyncio.run(reports.write("../../etc/passwd", "x", [])) == path
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("value", [-1, 0.6, float("nan"), -0.1, "x", True])
def test_a_limit_that_makes_no_sense_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="max_corrupt"):
        parse_dataset("wiki", {"uri": "/x", "max_corrupt": value})
    assert parse_dataset("wiki", {"uri": "/x", "max_corrupt": 3}).max_corrupt == 3
    assert parse_dataset("wiki", {"uri": "/x", "max_corrupt": 0.25}).max_corrupt == 0.25
