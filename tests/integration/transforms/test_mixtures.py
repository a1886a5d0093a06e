"""Mixtures through real daemons: exact shares, every source's own epochs, any number of ranks."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import ConfigError, CursorRejected, GyreError, InvalidRequest
from gyre_client.loader.text import texts

from tests.batches import Batch, same, take
from tests.conftest import Daemon, StartDaemon, to_toml
from tests.elastic import Stage, in_stages
from tests.mixtures import FIRST, SIZES, source_of, text_of, write_sources
from tests.packing import check_packed, joined

G = 8
PLAN = ("plan", "--sources", "--batch-size", str(G))
WEIGHTS = {"web": 0.5, "code": 0.3, "books": 0.2}
MIXTURES: dict[str, Any] = {
    "all": {"weights": WEIGHTS, "block": 40},
    "nested": {"weights": {"all": 0.75, "code": 0.25}, "block": 16},
    "later": {
        "weights": WEIGHTS,
        "block": 40,
        "schedule": [{"step": 6, "weights": {"web": 0.1, "code": 0.9}}],
    },
    "epochs": {"epochs": {"web": 1, "code": 2}, "block": 17},
    "warm": {"sources": ["web", "books"], "temperature": 2.0, "block": 32},
}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {"datasets": write_sources(tmp_path / "data"), "mixtures": MIXTURES}


def batches(
    daemon: Daemon, name: str, num: int, state: dict[str, Any] | None = None, **arguments: Any
) -> tuple[list[Batch], dict[str, Any]]:
    """The next batches of a job on a mixture, and its state behind them."""
    arguments = {"batch_size": G, "seed": 5, "rank": 0, "world_size": 1} | arguments
    with Loader(name, address=daemon.address, **arguments) as loader:
        if state:
            loader.load_state_dict(state)
        found = [{key: each.clone() for key, each in batch.items()} for batch in take(loader, num)]
        return found, loader.state_dict()


def values(found: list[Batch]) -> list[int]:
    return [value for batch in found for value in batch["id"].tolist()]


def test_shares_epochs_and_texts_are_exact(gyred: StartDaemon, config: dict[str, Any]) -> None:
    daemon = gyred(config)
    found, _ = batches(daemon, "all", 60)
    for batch in found:
        ids = batch["id"].tolist()
        assert texts(batch, "text") == [text_of(each) for each in ids]
        assert [list(FIRST)[each] for each in batch["source"].tolist()] == [
            source_of(each) for each in ids
        ]
        assert "page" not in batch  # not every source has it
    read = values(found)
    for begin in range(0, len(read), 40):  # a block of 40 positions
        block = [source_of(each) for each in read[begin : begin + 40]]
        assert {name: block.count(name) for name in WEIGHTS} == {"web": 20, "code": 12, "books": 8}
    for name, size in SIZES.items():  # each source goes through its own epochs
        own = [each for each in read if source_of(each) == name]
        for begin in range(0, len(own) - size, size):
            assert sorted(own[begin : begin + size]) == list(range(FIRST[name], FIRST[name] + size))
        assert len(own) < 2 * size or own[:size] != own[size : 2 * size]


def test_ranks_resume_and_see_the_same(gyred: StartDaemon, config: dict[str, Any]) -> None:
    daemon = gyred(config)
    whole, _ = batches(daemon, "later", 20)
    shares = [[source_of(each) for each in values([batch])].count("books") for batch in whole]
    assert any(shares[:6])
    assert not any(shares[6:])  # the schedule leaves it out from step 6 on

    def open_rank(rank: int, num_ranks: int) -> Loader:
        ranks: dict[str, Any] = {"rank": rank, "world_size": num_ranks}
        return Loader("later", address=daemon.address, batch_size=G, seed=5, **ranks)

    stages = [Stage(1, 3), Stage(4, 7), Stage(2, 10)]
    again, _ = in_stages(daemon, open_rank, stages, joined)
    assert values(again) == values(whole)


def test_nested_and_other_weights(gyred: StartDaemon, config: dict[str, Any]) -> None:
    daemon = gyred(config)
    read = [source_of(each) for each in values(batches(daemon, "nested", 40)[0])]
    assert {name: read.count(name) for name in FIRST} == {"web": 120, "code": 152, "books": 48}
    found, _ = batches(daemon, "nested", 40)
    assert {int(each) for batch in found for each in batch["source"]} == {0, 1, 2, 3}
    with Loader("epochs", batch_size=10, address=daemon.address) as loader:
        assert len(loader) == (90 + 2 * 40) // 10
        read = [source_of(each) for batch in loader for each in batch["id"].tolist()]
    assert {name: read.count(name) for name in ("web", "code")} == {"web": 90, "code": 80}
    read = [source_of(each) for each in values(batches(daemon, "warm", 40)[0])]
    share = 25**0.5 / (25**0.5 + 90**0.5)
    assert abs(read.count("books") - share * 320) < 1


def test_a_state_of_another_mixture_is_refused(gyred: StartDaemon, config: dict[str, Any]) -> None:
    daemon = gyred(config)
    _, state = batches(daemon, "all", 3)
    with pytest.raises(CursorRejected, match="its sources are web, code, books"):
        batches(daemon, "warm", 1, state)
    with pytest.raises(CursorRejected, match="a mixture"):
        batches(daemon, "web", 1, state)
    others = {
        "block": ({"block": 80}, "the block"),
        "weights": ({"weights": WEIGHTS | {"web": 0.6}}, "web=0.5, code=0.3, books=0.2 there"),
    }
    for change, message in others.values():
        changed = MIXTURES | {"all": MIXTURES["all"] | change}
        text = to_toml({"listen": [daemon.address], **config, "mixtures": changed})
        daemon.reconfigure(text)
        with pytest.raises(CursorRejected, match=message):
            batches(daemon, "all", 1, state)


def wrong() -> Iterator[tuple[str, dict[str, Any], str]]:
    yield "missing", {"weights": {"web": 1, "nope": 1}}, "names the source `nope`"
    yield "self", {"weights": {"web": 1, "self": 1}}, "a source of itself"
    yield "none", {"sources": ["web"]}, "one of `weights`"
    yield "both", {"weights": {"web": 1}, "epochs": {"web": 1}}, "weights and epochs"
    yield "zero", {"weights": {"web": 0}}, "0 for every source"
    yield (
        "steps",
        {
            "weights": {"web": 1},
            "schedule": [{"step": 5, "weights": {"web": 1}}, {"step": 5, "weights": {"web": 1}}],
        },
        "they must rise",
    )
    yield "key", {"weight": {"web": 1}}, "did you mean `weights`"


@pytest.mark.parametrize(("name", "table", "message"), [*wrong()])
def test_definitions_that_make_no_sense(
    config: dict[str, Any], tmp_path: Path, name: str, table: dict[str, Any], message: str
) -> None:
    from gyre_daemon.config import load
    from gyre_daemon.errors import ConfigError as Refused

    path = tmp_path / "gyre.toml"
    path.write_text(to_toml({**config, "mixtures": {name: table}}))
    with pytest.raises(Refused, match=message):
        load(path, {}, {})


def test_what_cannot_be_mixed_is_refused(gyred: StartDaemon, config: dict[str, Any]) -> None:
    config["datasets"]["cast"] = config["datasets"]["web"] | {"cast": {"id": "float32"}}
    config["mixtures"] = MIXTURES | {
        "types": {"weights": {"web": 1, "cast": 1}},
        "rare": {"weights": {"web": 1, "code": 0.00001}},
    }
    daemon = gyred(config)

    def refused(name: str, kind: type[GyreError], message: str, **arguments: Any) -> None:
        with pytest.raises(kind, match=message):
            batches(daemon, name, 1, **arguments)

    refused("types", ConfigError, r"int64\[\] in `web` and float32\[\] in `cast`")
    refused("rare", InvalidRequest, "less than one position in a block of 1024")
    refused("all", InvalidRequest, "no blocks", order="block")
    refused("all", InvalidRequest, "no end that could be padded", tail="pad")
    refused("all", InvalidRequest, "cannot join", join="rotate")


def test_balanced_ranks_share_the_same_batches(gyred: StartDaemon, config: dict[str, Any]) -> None:
    daemon = gyred(config)
    whole, _ = batches(daemon, "all", 6)
    balance = {"linear": 1.0, "field": "text"}
    parts = [
        batches(daemon, "all", 6, rank=rank, world_size=2, balance=balance)[0] for rank in range(2)
    ]
    for step, batch in enumerate(whole):
        both = [value for its in parts for value in its[step]["id"].tolist()]
        assert sorted(both) == sorted(batch["id"].tolist())
    assert same(whole, batches(daemon, "all", 6, order="full")[0])


def printed(capsys: pytest.CaptureFixture[str], daemon: Daemon, *arguments: str) -> tuple[int, str]:
    status = main([*arguments, "--address", daemon.address])
    found = capsys.readouterr()
    return status, found.out + found.err


def test_a_running_job_gets_other_weights(
    gyred: StartDaemon, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = gyred(config)
    plain, _ = batches(daemon, "all", 40)

    def open_rank(rank: int) -> Loader:
        return Loader(
            "all",
            batch_size=G,
            seed=5,
            rank=rank,
            world_size=2,
            job="train",
            address=daemon.address,
            prefetch_batches=2,
        )

    def step(iterators: Sequence[Iterator[Batch]]) -> list[int]:
        return [value for each in iterators for value in next(each)["id"].tolist()]

    with open_rank(0) as one, open_rank(1) as other:
        loaders = [one, other]
        iterators = [each.stream() for each in loaders]
        read = [step(iterators) for _ in range(3)]
        early = one.state_dict()
        status, text = printed(capsys, daemon, "mix", "all", "--weights", "code=1", "--from-step=1")
        assert status == 2
        assert "earliest" in text
        for weights, message in (("nope=1", "no source 'nope'"), ("code=0", "above")):
            status, text = printed(
                capsys, daemon, "mix", "all", f"--weights={weights}", "--from-step", "30"
            )
            assert (status, message in text) == (2, True)
        status, text = printed(capsys, daemon, "mix", "all", "--weights=code=1", "--from-step=30")
        assert (status, "2 ranks of the job train" in text) == (0, True), text
        read += [step(iterators) for _ in range(3, 36)]
        late = one.state_dict()
        plan = (*PLAN, "all", "--step", "28:32", "--job")
        status, text = printed(capsys, daemon, *plan, "train")
        assert (status, "from step 30 (given to the job): web 0.00%, code 100.00%" in text) == (
            0,
            True,
        ), text
        read_by = [source_of(value) for batch in read[28:32] for value in batch]
        counts = json.loads(printed(capsys, daemon, *plan, "train", "--json")[1])["counts"]
        both = zip(counts[0]["num_samples"], counts[-1]["num_samples"], strict=True)
        assert [after - before for before, after in both] == [*map(read_by.count, WEIGHTS)]
        status, text = printed(capsys, daemon, *plan, "absent")
        assert (status, "no job of yours named 'absent' reads the mixture" in text) == (2, True)
    assert read[:30] == [batch["id"].tolist() for batch in plain[:30]]
    assert all(source_of(value) == "code" for batch in read[30:] for value in batch)
    _, text = printed(capsys, daemon, *PLAN, "all", "--step", "0:40", "--seed", "5")
    assert "from step 0: web 50.00%, code 30.00%, books 20.00%" in text
    assert text.count("steps ") == 20
    daemon.kill()
    daemon.start()
    # the state has the change, or the daemon's record does; a state of another job has none
    again, _ = batches(daemon, "all", 4, late)
    assert all(source_of(value) == "code" for value in values(again))
    again, _ = batches(daemon, "all", 33, early, job="train")
    assert values(again) == [value for batch in read[3:] for value in batch]
    again, _ = batches(daemon, "all", 37, early, job="another")
    assert values(again) == values(plain[3:])
    again, _ = batches(daemon, "all", 40, job="train")  # it begins again: it was given nothing
    assert values(again) == values(plain)


PACKED = {
    "weights": {"web": 0.5, "code": 0.25, "books": 0.25},
    "block": 8,
    "pack": {"field": "text", "length": 64, "overlong": "split"},
}


def test_documents_of_a_mixture_are_packed_by_source(
    gyred: StartDaemon, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config["mixtures"] = {
        "packed": PACKED,
        "inner": {"weights": {"web": 2, "code": 1}, "block": 8},
        "outer": {"weights": {"inner": 3, "books": 1}, "block": 8, "pack": PACKED["pack"]},
        "plain": {key: value for key, value in PACKED.items() if key != "pack"},
    }
    daemon = gyred(config)
    found, _ = batches(daemon, "packed", 12)
    sources = torch.cat([batch["source"] for batch in found]).tolist()
    for begin in range(0, len(sources), 8):  # exact in each block of sequences
        block = sources[begin : begin + 8]
        assert [block.count(number) for number in range(3)] == [4, 2, 2]
    assert same(found, batches(daemon, "plain", 12, pack=PACKED["pack"])[0])
    first_of = {"web": 0, "code": SIZES["web"], "books": SIZES["web"] + SIZES["code"]}
    counts: dict[str, list[int]] = {name: [] for name in first_of}
    for batch in found:
        parts = check_packed(batch, "text", 0)
        rows = torch.repeat_interleave(batch["source"], batch["document_id.offsets"].diff())
        for source, (document, tokens) in zip(rows.tolist(), parts, strict=True):
            name = list(first_of)[source]
            own = document - first_of[name]
            assert 0 <= own < SIZES[name]
            assert bytes(tokens.tolist()).decode() == text_of(FIRST[name] + own)
            counts[name].append(own)
    # every source goes through all its documents before any comes again
    for name, read in counts.items():
        full = [each for each in range(SIZES[name]) if text_of(FIRST[name] + each)]
        times = [read.count(each) for each in full]
        assert max(times) - min(times) <= 1
        assert max(times) > 1
    nested, _ = batches(daemon, "outer", 12)
    sources = torch.cat([batch["source"] for batch in nested]).tolist()
    assert [sources.count(number) for number in range(3)] == [48, 24, 24]
    for batch in nested:
        check_packed(batch, "text", 0)
    status, text = printed(capsys, daemon, *PLAN, "packed", "--step", "0:12")
    assert (status, "web" in text) == (0, True), text
    assert " 48 " in text
    status, text = printed(capsys, daemon, "describe", "packed", "--num", "1")
    assert (status, "155 documents by text into sequences of 64" in text) == (0, True), text
    with pytest.raises(InvalidRequest, match=r"the source `web`: .* longer than 20 tokens"):
        batches(daemon, "plain", 1, pack={"field": "text", "length": 20})
