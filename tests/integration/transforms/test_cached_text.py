"""Results of different lengths in the node's cache: what is made how often, by a real daemon."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import CursorRejected
from tokenizers import Tokenizer

from tests.batches import Batch, same, take
from tests.conftest import Daemon, to_toml
from tests.daemons import status
from tests.elastic import Stage, in_stages
from tests.packing import joined
from tests.preloaded.interpreter import Interpreter
from tests.tokenizers import make_tokenizer
from tests.waiting import until

NUM, PER_SHARD, LENGTH, END = 300, 75, 96, 1
WORDS = ("cat", "the mat", "hello world", "ä", "no", "answer is")
PACK = {"field": "tokens", "length": LENGTH, "overlong": "split"}
CACHE = {"name": "cache"}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Chain = Sequence[Mapping[str, Any]]


def texts() -> list[str]:
    """Texts of many lengths, in all about ten blocks of the cache; some are empty."""
    generator = np.random.default_rng(4)
    counts = np.minimum(generator.lognormal(4.6, 0.9, NUM).astype(int), 900)
    counts[[5, 6, NUM - 1]] = 0
    return [" ".join(generator.choice(WORDS, count)) for count in counts]


def write(folder: Path) -> dict[str, dict[str, Any]]:
    """Writes the texts in two formats, with a number and a talk; returns their tables."""
    rows = [
        {
            "text": text,
            "number": number,
            "score": number / 8,
            "talk": json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"number {number}"},
                        {"role": "assistant", "content": text[:400]},
                    ]
                }
            ),
        }
        for number, text in enumerate(texts())
    ]
    for name in ("lines", "columns"):
        (folder / name).mkdir()
    for shard in range(NUM // PER_SHARD):
        some = rows[shard * PER_SHARD : (shard + 1) * PER_SHARD]
        lines = "".join(json.dumps({"text": row["text"]}) + "\n" for row in some)
        (folder / f"lines/{shard}.jsonl").write_text(lines)
        path = folder / f"columns/{shard}.parquet"
        pq.write_table(pa.Table.from_pylist(some), path, row_group_size=20)
    return {name: {"uri": str(folder / name)} for name in ("lines", "columns")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the texts, and a tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    write(folder)
    make_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def tables(data: Path) -> dict[str, dict[str, Any]]:
    return {name: {"uri": str(data / name)} for name in ("lines", "columns")}


class Served(NamedTuple):
    """A daemon, and its configuration, which alone may name the file of a tokenizer."""

    daemon: Daemon
    config: dict[str, Any]

    def name_of(self, source: str, chain: Chain) -> str:
        """The name of a dataset with this chain, which is added where it is new."""
        datasets = self.config["datasets"]
        name = f"{source}-{hashlib.sha256(json.dumps(chain).encode()).hexdigest()[:12]}"
        if name not in datasets:
            datasets[name] = datasets[source] | {"transforms": list(chain)}
            event = self.daemon.reconfigure(to_toml(self.config))
            assert event["event"] == "reloaded", event
        return name


def start(folder: Path, config: Mapping[str, Any], interpreter: Interpreter) -> Served:
    """Starts a daemon with a folder of its own."""
    folder.mkdir()
    address = f"unix:{folder}/run/gyre.sock"
    values = {
        "listen": [address],
        "index_dir": str(folder / "index"),
        "drain_timeout_s": 3.0,
        "num_transform_workers": 2,
        **config,
    }
    (folder / "gyre.toml").write_text(to_toml(values))
    daemon = Daemon(folder / "gyre.toml", address, folder / "log", {}, interpreter=interpreter)
    return Served(daemon.start(), values)


@pytest.fixture(scope="module")
def served(
    data: Path, tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter
) -> Iterator[Served]:
    """A daemon with a cache on disk; it may have a faster engine for the tokenizer."""
    folder = tmp_path_factory.mktemp("served")
    long = tables(data)["lines"] | {
        "filter": "length(tokens) >= 200",
        "transforms": [tokenize(data), CACHE],
    }
    datasets = {**tables(data), "long": long}
    config = {"cache_dir": str(folder / "cache"), "datasets": datasets}
    found = start(folder / "run", config, interpreter)
    yield found
    found.daemon.stop()


@pytest.fixture
def serve(
    tmp_path: Path, interpreter: Interpreter
) -> Iterator[Callable[[Mapping[str, Any]], Served]]:
    """`serve({"datasets": {...}})` starts another daemon."""
    started: list[Served] = []

    def begin(config: Mapping[str, Any]) -> Served:
        started.append(start(tmp_path / f"daemon-{len(started)}", config, interpreter))
        return started[-1]

    yield begin
    for each in started:
        each.daemon.stop()


def tokenize(data: Path, field: str = "json", **options: Any) -> dict[str, Any]:
    path = str(data / "tokenizer.json")
    key = {"key": "text"} if field == "json" else {}
    return {"name": "tokenize", "field": field, "tokenizer": path, "end": END, **key, **options}


def loader(served: Served, dataset: str, transform: Chain | None, **options: Any) -> Loader:
    name = dataset if transform is None else served.name_of(dataset, transform)
    return Loader(name, address=served.daemon.address, **{"batch_size": 6, "seed": 3, **options})


def num_transformed(served: Served) -> int:
    return status(served.daemon).num_samples_transformed


def epoch(
    served: Served, dataset: str, transform: Chain | None, **options: Any
) -> tuple[list[Batch], int]:
    """The batches of an epoch, and how many samples were transformed for it."""
    before = num_transformed(served)
    with loader(served, dataset, transform, epochs=1, **options) as source:
        batches = [{name: each.clone() for name, each in batch.items()} for batch in source]
    return batches, num_transformed(served) - before


def ids_of(data: Path, text: str) -> list[int]:
    library = Tokenizer.from_file(str(data / "tokenizer.json"))
    return [*library.encode(text).ids, END]


Serve = Callable[[Mapping[str, Any]], Served]

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
    served: Served, data: Path, dataset: str, way: str
) -> None:
    chain = [tokenize(data, "json" if dataset == "lines" else "text")]
    options = WAYS[way]
    cached = [*chain, CACHE]
    epoch(served, dataset, cached)  # whichever way comes first makes each document once
    for seed in (3, 4):
        wanted, num_plain = epoch(served, dataset, chain, seed=seed, **options)
        found, num_made = epoch(served, dataset, cached, seed=seed, **options)
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
        assert whole == {number: ids_of(data, text) for number, text in enumerate(texts())}


def test_the_first_epoch_finds_what_was_made_to_be_measured(served: Served, data: Path) -> None:
    chain = [tokenize(data, end=2), CACHE]
    _, num_made = epoch(served, "lines", chain)
    assert not num_made  # they were made when they were measured
    events = [each["event"] for each in served.daemon.events()]
    assert "engine verified" in events or "engine not used" in events


def test_what_the_command_measures_is_kept_too(served: Served, data: Path) -> None:
    name = served.name_of("columns", [tokenize(data, "text", end=4), CACHE])
    assert main(["index", name, "--address", served.daemon.address]) == 0
    _, num_made = epoch(served, name, None)
    assert not num_made


def test_the_command_measures_before_and_behind_the_cache(
    served: Served, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = {"name": "truncate", "field": "tokens", "length": 50}
    name = served.name_of("columns", [tokenize(data, "text", end=5), CACHE, cut])
    begin = served.daemon.log_path.stat().st_size
    assert main(["index", name, "--address", served.daemon.address]) == 0
    assert "of 4 shards, 0 of them measured before" in capsys.readouterr().out
    events = [each["event"] for each in served.daemon.events(begin)]
    assert events.count("shard measured") == 2 * NUM // PER_SHARD


def test_what_comes_behind_is_done_each_time(served: Served, data: Path) -> None:
    crop = {"name": "crop_or_pad", "field": "tokens", "length": 32, "start": "random"}
    cut = {"name": "truncate", "field": "tokens", "length": 70}
    for rest, pack in (([crop], {}), ([cut], {}), ([cut], {"pack": PACK})):
        for _ in range(2):
            options: dict[str, Any] = {"seed": 5, **pack}
            wanted, num_plain = epoch(served, "lines", [tokenize(data), *rest], **options)
            found, num_made = epoch(served, "lines", [tokenize(data), CACHE, *rest], **options)
            assert same(found, wanted)
            assert min(num_made, num_plain) > NUM / 2  # each is cut again
        before = status(served.daemon).cache
        epoch(served, "lines", [tokenize(data), CACHE, *rest], **{**options, "seed": 6})
        after = status(served.daemon).cache
        assert (after.num_misses, after.num_past) == (before.num_misses, before.num_past)


def test_conversations_keep_their_masks(served: Served, data: Path) -> None:
    """With nothing behind the cache, and with something that leaves the tokens as they are."""
    chat = {"name": "chat", "field": "talk", "tokenizer": str(data / "tokenizer.json")}
    cast = {"name": "cast", "field": "score", "dtype": "float32"}
    for pack in ({}, {"pack": PACK}):
        wanted, _ = epoch(served, "columns", [chat], **pack)
        found, _ = epoch(served, "columns", [chat, CACHE], **pack)
        again, num_made = epoch(served, "columns", [chat, CACHE], **pack)
        assert same(found, wanted)
        assert same(again, wanted)
        assert not num_made
        wanted, _ = epoch(served, "columns", [chat, cast], **pack)
        found, _ = epoch(served, "columns", [chat, CACHE, cast], **pack)
        assert all(one.keys() == other.keys() for one, other in zip(found, wanted, strict=True))
        names = sorted(wanted[0])  # what passes comes last
        assert same(*([{name: each[name] for name in names} for each in all_of]
                      for all_of in (found, wanted)))  # fmt: skip
        masks = [bool(value) for batch in found for value in batch["loss_mask"].flatten()]
        assert 0.1 < np.mean(masks) < 0.95


def test_ranks_are_balanced_and_a_state_fits_both(served: Served, data: Path) -> None:
    """A job that resumes on other ranks, through kills of the daemon, has the plain batches."""
    balance = {"linear": 1, "quadratic": 0}
    chain = [tokenize(data)]

    def rank(number: int, count: int, transform: Chain = (*chain, CACHE)) -> Loader:
        ranks: dict[str, Any] = {"rank": number, "world_size": count, "balance": balance}
        return loader(served, "lines", transform, pack=PACK, **ranks)

    with rank(0, 1, chain) as alone:
        wanted = take(alone, 12)
        later = take(alone, 2)
    stages = [Stage(1, 4), Stage(3, 5, kill_before=3), Stage(2, 3)]
    got, state = in_stages(served.daemon, rank, stages, joined)
    for parts, whole in zip(got, wanted, strict=True):
        one, other = parts["sample_id"].argsort(), whole["sample_id"].argsort()
        assert parts["tokens"][one].equal(whole["tokens"][other])
    with rank(0, 1, chain) as alone:
        alone.load_state_dict(state)
        assert same(take(alone, 2), later)


def test_filters_compare_lengths_that_are_measured_once(served: Served, data: Path) -> None:
    begin = served.daemon.log_path.stat().st_size
    _, _ = epoch(served, "long", None)
    found, num_made = epoch(served, "long", None, seed=4)
    measured = [each for each in served.daemon.events(begin) if each["event"] == "shard measured"]
    assert len(measured) <= NUM // PER_SHARD
    assert not num_made
    lengths = [len(ids_of(data, text)) for text in texts()]
    rows = sorted(np.concatenate([np.diff(batch["tokens.offsets"]) for batch in found]).tolist())
    assert rows == sorted(each for each in lengths if each >= 200)


def test_a_daemon_that_starts_again_has_them_on_disk(served: Served, data: Path) -> None:
    chain = [tokenize(data, end=3), CACHE]
    before = status(served.daemon).cache.disk_bytes
    wanted, _ = epoch(served, "lines", chain)
    num_bytes = sum(4 * len(batch["tokens"]) for batch in wanted)
    until(lambda: status(served.daemon).cache.disk_bytes >= before + num_bytes)
    begin = served.daemon.log_path.stat().st_size
    served.daemon.stop()
    served.daemon.restart()
    found, num_made = epoch(served, "lines", chain)
    assert same(found, wanted)
    assert not num_made
    assert not [each for each in served.daemon.events(begin) if each["event"] == "shard measured"]


def test_another_tokenizer_in_the_same_file_is_another_chain(
    serve: Serve, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    chain = [tokenize(tmp_path), CACHE]
    served = serve({"cache_dir": str(tmp_path / "cache"), "datasets": tables(data)})
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
def test_a_cache_that_is_too_small_changes_no_batch(serve: Serve, data: Path, way: str) -> None:
    served = serve({"cache_memory": 150_000, "datasets": tables(data)})
    chain, options = [tokenize(data)], WAYS[way]
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


def test_sources_of_mixtures_keep_their_own(serve: Serve, data: Path) -> None:
    plain = {
        "lines": tables(data)["lines"] | {"transforms": [tokenize(data)]},
        "columns": tables(data)["columns"]
        | {"columns": ["text"], "transforms": [tokenize(data, "text")]},
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
    served = serve({"datasets": {**plain, **kept}, "mixtures": mixtures})
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
            check_mixed(data, again)


def check_mixed(data: Path, batches: Sequence[Batch]) -> None:
    wanted = [ids_of(data, text) for text in texts()]
    for batch in batches:
        ends = batch["tokens.offsets"].tolist()
        for row, number in enumerate(batch["sample_id"].tolist()):
            ids = batch["tokens"][ends[row] : ends[row + 1]].tolist()
            assert ids == wanted[number % NUM]


def test_what_cannot_be_tokenised_is_replaced_alike(
    serve: Serve, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad").mkdir()
    lines = [json.dumps({"text": text}) for text in texts()[:60]]
    lines[7], lines[8], lines[33] = '{"other": 1}', '{"text": 5}', '{"other": 2}'
    (tmp_path / "bad/a.jsonl").write_text("\n".join(lines) + "\n")
    replaced = {"uri": str(tmp_path / "bad"), "on_corrupt": "replace", "max_corrupt": 4}
    served = serve({"report_dir": str(tmp_path / "reports"), "datasets": {"bad": replaced}})
    cut = {"name": "truncate", "field": "tokens", "length": 50}
    for rest, options in (([], {}), ([cut], {}), ([], {"pack": PACK})):
        wanted, _ = epoch(served, "bad", [tokenize(data), *rest], **options)
        found, _ = epoch(served, "bad", [tokenize(data), CACHE, *rest], **options)
        assert same(found, wanted)
        with loader(served, "bad", [tokenize(data), CACHE, *rest], **options) as source:
            next(source)
            state = source.state_dict()
        with loader(served, "bad", [tokenize(data), *rest], **options) as source:
            source.load_state_dict(state)
            assert same([next(source)], wanted[1:2])
