"""The fingerprint tells data apart, and a copy of it elsewhere is the same."""

from dataclasses import replace

from gyre_daemon.datasets.dataset import Memo, fingerprint, fingerprint_ranges
from gyre_daemon.storage.shard import Shard
from hypothesis import given
from hypothesis import strategies as st

from tests.shard_formats import shard_format

SHARDS = [Shard("a.bin", 1000, "1"), Shard("b.bin", 2000, "2")]
PROBES = [b"the middle of a", b"the middle of b"]


def print_of(shards: list[Shard], probes: list[bytes], length: int = 10) -> str:
    index = shard_format("tokens", dtype="uint16", sequence_length=length).assemble(shards, [])
    return fingerprint(shards, index, probes)


def test_a_fingerprint_covers_names_sizes_layout_and_contents() -> None:
    original = print_of(SHARDS, PROBES)
    others = [
        print_of(SHARDS, PROBES, length=20),
        print_of([replace(SHARDS[0], name="c.bin"), SHARDS[1]], PROBES),
        print_of([replace(SHARDS[0], size_bytes=1002), SHARDS[1]], PROBES),
        print_of(SHARDS[::-1], PROBES),
        print_of(SHARDS, PROBES[::-1]),
        print_of(SHARDS, [PROBES[0], PROBES[1][:-1]]),
        print_of(SHARDS, [PROBES[0] + PROBES[1], b""]),
    ]
    assert len({original, *others}) == 1 + len(others)
    assert original == print_of(SHARDS, PROBES)
    assert len(original) == 32


def test_a_fingerprint_does_not_cover_times_and_etags() -> None:
    copied = [replace(shard, version='"another"') for shard in SHARDS]
    assert print_of(copied, PROBES) == print_of(SHARDS, PROBES)


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=300))
def test_the_contents_of_evenly_chosen_shards_are_covered(sizes: list[int]) -> None:
    shards = [Shard(f"{number}", size, "") for number, size in enumerate(sizes)]
    chosen, starts, stops = fingerprint_ranges(shards)
    assert len(chosen) == len(set(chosen)) <= 32
    if len(shards) <= 32:
        assert chosen == [number for number, size in enumerate(sizes) if size], "all of a few"
    for shard, start, stop in zip(chosen, starts, stops, strict=True):
        assert 0 <= start < stop <= sizes[shard]
        assert stop - start == min(sizes[shard], 4096)
        assert abs((start + stop) / 2 - sizes[shard] / 2) <= 1, "its middle"


def test_a_memo_keeps_the_last_results_and_what_they_came_from() -> None:
    memo: Memo[str] = Memo(2)
    assert memo.get("a") is None
    assert memo.keep("of one", "a", 1) == "of one"
    assert (memo.get("a", 1), memo.get("a", 2)) == ("of one", None)
    memo.keep("of two", "a", 2)  # in place of the one before
    memo.keep("other", "b")
    assert memo.get("a", 2) == "of two"  # used last
    memo.keep("third", "c")
    assert list(memo) == ["of two", "third"]
    memo.clear()
    assert not list(memo)
