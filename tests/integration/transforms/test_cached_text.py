"""Results of different lengths in the node's cache: what is made how often, by a real daemon."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import CursorRejected
from tokenizers import Tokenizer

from tests.batches import same, take
from tests.cached_texts import (
    CACHE,
    END,
    NUM,
    PACK,
    Chain,
    Serve,
    Served,
    epoch,
    ids_of,
    loader,
    tables,
    texts,
    tokenize,
)
from tests.daemons import status
from tests.elastic import Stage, in_stages
from tests.packing import joined
from tests.tokenizers import make_tokenizer
from tests.waiting import until

WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "block": {"order": "block", "io_block_bytes": 1 << 14, "window_blocks": 2},
    "packed": {"pack": PACK},
    "truncated": {"pack": {**PACK, "overlong": "truncate"}},
    "buckets": {"bucket": {"field": "tokens", "window_batches": 4}, "tail": "drop"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dataset", ["lines", "columns"])
def test_the_second_seed_job_and_epoch_make_nothing(
    served_texts: Served, text_folder: Path, dataset: str, way: str
) -> None:
    chain = [tokenize(text_folder, "json" if dataset == "lines" else "text")]
    options = WAYS[way]
    cached = [*chain, CACHE]
    epoch(served_texts, dataset, cached)  # whichever way comes first makes each document once
    for seed in (3, 4):
        wanted, num_plain = epoch(served_texts, dataset, chain, seed=seed, **options)
        found, num_made = epoch(served_texts, dataset, cached, seed=seed, **options)
        assert same(found, wanted)
        assert num_plain > NUM / 2
        assert not num_made
    if way == "full":
        whole = {
            int(number): batch["tokens"][begin:end].tolist()
            for batch in found
            for number, begin, end in zip(
                batch["sample_id"].tolist(),
                batch["tokens.offsets"].tolist(),
                batch["tokens.offsets"][1:].tolist(),
                strict=False,
            )
        }
        assert whole == {number: ids_of(text_folder, text) for number, text in enumerate(texts())}


def test_the_first_epoch_makes_each_sample_once(served_texts: Served, text_folder: Path) -> None:
    chain = [tokenize(text_folder, end=2), CACHE]
    _, num_made = epoch(served_texts, "lines", chain)
    assert num_made == NUM
    events = [each["event"] for each in served_texts.daemon.events()]
    assert "engine verified" in events or "engine not used" in events


def test_what_comes_behind_is_done_each_time(served_texts: Served, text_folder: Path) -> None:
    crop = {"name": "crop_or_pad", "field": "tokens", "length": 32, "start": "random"}
    cut = {"name": "truncate", "field": "tokens", "length": 70}
    for rest, pack in (([crop], {}), ([cut], {}), ([cut], {"pack": PACK})):
        for _ in range(2):
            options: dict[str, Any] = {"seed": 5, **pack}
            wanted, num_plain = epoch(
                served_texts, "lines", [tokenize(text_folder), *rest], **options
            )
            found, num_made = epoch(
                served_texts, "lines", [tokenize(text_folder), CACHE, *rest], **options
            )
            assert same(found, wanted)
            assert min(num_made, num_plain) > NUM / 2  # each is cut again
        before = status(served_texts.daemon).cache
        epoch(
            served_texts, "lines", [tokenize(text_folder), CACHE, *rest], **{**options, "seed": 6}
        )
        after = status(served_texts.daemon).cache
        assert (after.num_misses, after.num_past) == (before.num_misses, before.num_past)


def test_conversations_keep_their_masks(served_texts: Served, text_folder: Path) -> None:
    """With nothing behind the cache, and with something that leaves the tokens as they are."""
    chat = {"name": "chat", "field": "talk", "tokenizer": str(text_folder / "tokenizer.json")}
    cast = {"name": "cast", "field": "score", "dtype": "float32"}
    for pack in ({}, {"pack": PACK}):
        wanted, _ = epoch(served_texts, "columns", [chat], **pack)
        found, _ = epoch(served_texts, "columns", [chat, CACHE], **pack)
        again, num_made = epoch(served_texts, "columns", [chat, CACHE], **pack)
        assert same(found, wanted)
        assert same(again, wanted)
        assert not num_made
        wanted, _ = epoch(served_texts, "columns", [chat, cast], **pack)
        found, _ = epoch(served_texts, "columns", [chat, CACHE, cast], **pack)
        assert all(one.keys() == other.keys() for one, other in zip(found, wanted, strict=True))
        names = sorted(wanted[0])  # what passes comes last
        assert same(*([{name: each[name] for name in names} for each in all_of]
                      for all_of in (found, wanted)))  # fmt: skip
        masks = [bool(value) for batch in found for value in batch["loss_mask"].flatten()]
        assert 0.1 < np.mean(masks) < 0.95


def test_ranks_are_balanced_and_a_state_fits_both(served_texts: Served, text_folder: Path) -> None:
    """A job that resumes on other ranks, through kills of the daemon, has the plain batches."""
    balance = {"linear": 1, "quadratic": 0}
    chain = [tokenize(text_folder)]

    def rank(number: int, count: int, transform: Chain = (*chain, CACHE)) -> Loader:
        ranks: dict[str, Any] = {"rank": number, "world_size": count, "balance": balance}
        return loader(served_texts, "lines", transform, pack=PACK, **ranks)

    with rank(0, 1, chain) as alone:
        wanted = take(alone, 12)
        later = take(alone, 2)
    stages = [Stage(1, 4), Stage(3, 5, kill_before=3), Stage(2, 3)]
    got, state = in_stages(served_texts.daemon, rank, stages, joined)
    for parts, whole in zip(got, wanted, strict=True):
        one, other = parts["sample_id"].argsort(), whole["sample_id"].argsort()
        assert parts["tokens"][one].equal(whole["tokens"][other])
    with rank(0, 1, chain) as alone:
        alone.load_state_dict(state)
        assert same(take(alone, 2), later)


def test_a_daemon_that_starts_again_has_them_on_disk(
    served_texts: Served, text_folder: Path
) -> None:
    chain = [tokenize(text_folder, end=3), CACHE]
    before = status(served_texts.daemon).cache.disk_bytes
    wanted, _ = epoch(served_texts, "lines", chain)
    num_bytes = sum(4 * len(batch["tokens"]) for batch in wanted)
    until(lambda: status(served_texts.daemon).cache.disk_bytes >= before + num_bytes)
    begin = served_texts.daemon.log_path.stat().st_size
    served_texts.daemon.stop()
    served_texts.daemon.restart()
    found, num_made = epoch(served_texts, "lines", chain)
    assert same(found, wanted)
    assert not num_made
    assert not [
        each for each in served_texts.daemon.events(begin) if each["event"] == "shard measured"
    ]


def test_another_tokenizer_in_the_same_file_is_another_chain(
    serve_texts: Serve, text_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    chain = [tokenize(tmp_path), CACHE]
    served = serve_texts({"cache_dir": str(tmp_path / "cache"), "datasets": tables(text_folder)})
    seen = []
    states = []
    for size in (320, 262):
        library = Tokenizer.from_file(str(make_tokenizer(path, size)))
        with loader(served, "lines", chain) as source:
            batch = next(source)
            states.append(source.state_dict())
        ends = batch["tokens.offsets"].tolist()
        for row, number in enumerate(batch["sample_id"].tolist()):
            ids = batch["tokens"][ends[row] : ends[row + 1]].tolist()
            assert ids == [*library.encode(texts()[number]).ids, END]
        seen.append(batch["tokens"].tolist())
    assert seen[0] != seen[1]
    with loader(served, "lines", chain) as source, pytest.raises(CursorRejected):
        source.load_state_dict(states[0])


@pytest.mark.parametrize("way", ["full", "block", "packed"])
def test_a_cache_that_is_too_small_changes_no_batch(
    serve_texts: Serve, text_folder: Path, way: str
) -> None:
    served = serve_texts({"cache_memory": 150_000, "datasets": tables(text_folder)})
    chain, options = [tokenize(text_folder)], WAYS[way]
    for seed in (1, 2):
        wanted, _ = epoch(served, "lines", chain, seed=seed, **options)
        num_hits = status(served.daemon).cache.num_hits
        found, num_made = epoch(served, "lines", [*chain, CACHE], seed=seed, **options)
        assert same(found, wanted)
        assert num_made > 0
    assert status(served.daemon).cache.memory_bytes <= 150_000
    if way == "full":
        assert status(served.daemon).cache.num_hits > num_hits  # what has stayed is taken
    if way == "block":
        assert status(served.daemon).cache.num_evicted
