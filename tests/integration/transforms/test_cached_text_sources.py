"""Results of different lengths in the cache: of mixtures, of filters, as the command measures."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client.command.cli import main

from tests.batches import Batch, same, take
from tests.cached_texts import (
    CACHE,
    NUM,
    PACK,
    PER_SHARD,
    Serve,
    Served,
    epoch,
    ids_of,
    loader,
    num_transformed,
    tables,
    texts,
    tokenize,
)


def test_what_the_command_measures_is_measured_once(
    served_texts: Served, text_folder: Path
) -> None:
    name = served_texts.name_of("columns", [tokenize(text_folder, "text", end=4), CACHE])
    assert main(["index", name, "--address", served_texts.daemon.address]) == 0
    begin = served_texts.daemon.log_path.stat().st_size
    _, num_made = epoch(served_texts, name, None)
    assert num_made == NUM
    events = [each["event"] for each in served_texts.daemon.events(begin)]
    assert "shard measured" not in events


def test_the_command_measures_before_and_behind_the_cache(
    served_texts: Served, text_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = {"name": "truncate", "field": "tokens", "length": 50}
    name = served_texts.name_of("columns", [tokenize(text_folder, "text", end=5), CACHE, cut])
    begin = served_texts.daemon.log_path.stat().st_size
    assert main(["index", name, "--address", served_texts.daemon.address]) == 0
    assert "of 4 shards, 0 of them measured before" in capsys.readouterr().out
    events = [each["event"] for each in served_texts.daemon.events(begin)]
    assert events.count("shard measured") == 2 * NUM // PER_SHARD


def test_filters_compare_lengths_that_are_measured_once(
    served_texts: Served, text_folder: Path
) -> None:
    begin = served_texts.daemon.log_path.stat().st_size
    _, _ = epoch(served_texts, "long", None)
    found, num_made = epoch(served_texts, "long", None, seed=4)
    measured = [
        each for each in served_texts.daemon.events(begin) if each["event"] == "shard measured"
    ]
    assert len(measured) <= NUM // PER_SHARD
    assert not num_made
    lengths = [len(ids_of(text_folder, text)) for text in texts()]
    rows = sorted(np.concatenate([np.diff(batch["tokens.offsets"]) for batch in found]).tolist())
    assert rows == sorted(each for each in lengths if each >= 200)


@pytest.mark.parametrize("cached", [(), (CACHE,)])
def test_what_some_samples_lack_passes_a_chain(
    serve_texts: Serve, text_folder: Path, tmp_path: Path, cached: tuple[dict[str, str], ...]
) -> None:
    notes = [None if number % 3 else number for number in range(40)]
    table = pa.table({"text": texts()[:40], "note": pa.array(notes, pa.int64())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    chain = [tokenize(text_folder, "text"), *cached]
    datasets = {
        "all": {"uri": str(tmp_path / "a.parquet"), "transforms": chain},
        "some": {
            "uri": str(tmp_path / "a.parquet"),
            "transforms": chain,
            "filter": "note.present and length(tokens) > 0",
        },
    }
    served = serve_texts({"datasets": datasets})
    batches, _ = epoch(served, "all", None, batch_size=8)
    for batch in batches:
        for number, note, has in zip(
            batch["sample_id"].tolist(),
            batch["note"].tolist(),
            batch["note.present"].tolist(),
            strict=True,
        ):
            assert (note if has else None) == notes[number]
    chosen, _ = epoch(served, "some", None, batch_size=1)
    kept = [note for note in notes if note is not None]
    assert sorted(int(batch["note"]) for batch in chosen) == kept


def test_sources_of_mixtures_keep_their_own(serve_texts: Serve, text_folder: Path) -> None:
    plain = {
        "lines": tables(text_folder)["lines"] | {"transforms": [tokenize(text_folder)]},
        "columns": tables(text_folder)["columns"]
        | {"columns": ["text"], "transforms": [tokenize(text_folder, "text")]},
    }
    kept = {
        f"kept_{name}": table | {"transforms": [*table["transforms"], CACHE]}
        for name, table in plain.items()
    }
    weights = {"lines": 2, "columns": 1}
    mixtures = {
        "plain": {"weights": weights},
        "kept": {"weights": {f"kept_{name}": its for name, its in weights.items()}},
    }
    served = serve_texts({"datasets": {**plain, **kept}, "mixtures": mixtures})
    for options in ({}, {"pack": PACK}):
        with loader(served, "kept", None, **options) as source:
            found = take(source, 120)
        for batch in found:
            assert "tokens" in batch
        for seed in (3, 4):
            with loader(served, "kept", None, seed=seed, **options) as source:
                take(source, 300)  # all documents of both
            before = num_transformed(served)
            with loader(served, "kept", None, seed=seed, **options) as source:
                again = take(source, 120)
            assert num_transformed(served) == before
        if not options:
            check_mixed(text_folder, again)


def check_mixed(text_folder: Path, batches: Sequence[Batch]) -> None:
    wanted = [ids_of(text_folder, text) for text in texts()]
    for batch in batches:
        ends = batch["tokens.offsets"].tolist()
        for row, number in enumerate(batch["sample_id"].tolist()):
            ids = batch["tokens"][ends[row] : ends[row + 1]].tolist()
            assert ids == wanted[number % NUM]


def test_what_cannot_be_tokenised_is_replaced_alike(
    serve_texts: Serve, text_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad").mkdir()
    lines = [json.dumps({"text": text}) for text in texts()[:60]]
    lines[7], lines[8], lines[33] = '{"other": 1}', '{"text": 5}', '{"other": 2}'
    (tmp_path / "bad/a.jsonl").write_text("\n".join(lines) + "\n")
    replaced = {"uri": str(tmp_path / "bad"), "on_corrupt": "replace", "max_corrupt": 4}
    served = serve_texts({"report_dir": str(tmp_path / "reports"), "datasets": {"bad": replaced}})
    cut = {"name": "truncate", "field": "tokens", "length": 50}
    for rest, options in (([], {}), ([cut], {}), ([], {"pack": PACK})):
        wanted, _ = epoch(served, "bad", [tokenize(text_folder), *rest], **options)
        found, _ = epoch(served, "bad", [tokenize(text_folder), CACHE, *rest], **options)
        assert same(found, wanted)
        with loader(served, "bad", [tokenize(text_folder), CACHE, *rest], **options) as source:
            next(source)
            state = source.state_dict()
        with loader(served, "bad", [tokenize(text_folder), *rest], **options) as source:
            source.load_state_dict(state)
            assert same([next(source)], wanted[1:2])
