"""Mixtures through real daemons: exact shares, every source's own epochs, any number of ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_client import Loader
from gyre_client.batches.batch import texts
from gyre_client.command.cli import main
from gyre_client.errors import ConfigError, CursorRejected, GyreError, InvalidRequest

from tests.batches import Batch, same, take
from tests.conftest import Daemon, StartDaemon, to_toml
from tests.elastic import OpenRank, Stage, in_stages
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
    refused("all", InvalidRequest, "no source 'nope'", weights={"nope": 1})
    refused("all", InvalidRequest, "above", weights={"web": 0})
    refused("all", InvalidRequest, "less than one position", weights={"web": 1, "code": 0.001})
    refused("web", InvalidRequest, "`web` is no mixture", weights={"web": 1})


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


def test_weights_change_where_a_job_begins_or_resumes(
    gyred: StartDaemon, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = gyred(config)
    plain, _ = batches(daemon, "later", 30)
    only_code = {"code": 1.0}

    def open_rank(weights: dict[str, float] | None) -> OpenRank:
        def opened(rank: int, num_ranks: int) -> Loader:
            ranks: dict[str, Any] = {"rank": rank, "world_size": num_ranks, "weights": weights}
            return Loader("later", address=daemon.address, batch_size=G, seed=5, **ranks)

        return opened

    first, state = in_stages(daemon, open_rank(None), [Stage(2, 3)], joined)
    # other ranks, other weights: from step 3 on, to the step of the schedule
    stages = [Stage(4, 2, kill_before=1)]
    more, changed = in_stages(daemon, open_rank(only_code), stages, joined, state=state)
    # the same weights again change nothing, and neither does leaving them out: the state has them
    for weights in (only_code, None):
        rest, late = in_stages(daemon, open_rank(weights), [Stage(1, 25)], joined, state=changed)
        read = [[source_of(each) for each in values([batch])] for batch in rest]
        assert {source for batch in read[:1] for source in batch} == {"code"}
        if weights is None:
            assert {"web", "code"} == {source for batch in read[1:] for source in batch}
    assert values(first) == values(plain[:3])
    assert {source_of(each) for each in values(more)} == {"code"}
    for name in ("web", "code"):  # each source goes on in its epoch
        ids = [each for each in values(first + more + rest) if source_of(each) == name]
        assert len(set(ids[: SIZES[name]])) == min(len(ids), SIZES[name])
    with Loader("later", address=daemon.address, batch_size=G, seed=5, job="run") as loader:
        loader.load_state_dict(late)
        next(loader)
        plan = (*PLAN, "later", "--step", "0:40", "--job", "run")
        status, text = printed(capsys, daemon, *plan)
        assert (status, "from step 3 (given to the job): web 0.00%, code 100.00%" in text) == (
            0,
            True,
        ), text
        status, text = printed(capsys, daemon, *plan[:-1], "absent")
        assert (status, "named 'absent' reads the mixture" in text) == (2, True)
    begun, _ = batches(daemon, "later", 6, weights=only_code)
    assert {source_of(each) for each in values(begun)} == {"code"}


def test_a_script_with_weights_resumes_in_the_order_of_one_that_went_on(
    gyred: StartDaemon, config: dict[str, Any]
) -> None:
    daemon = gyred(config)
    only_code = {"code": 1.0}
    for weights in (only_code, WEIGHTS):  # other ones than the definition's, and the same
        whole, _ = batches(daemon, "later", 12, weights=weights)
        for num in (3, 6, 8):  # an entry of the schedule begins at step 6
            first, state = batches(daemon, "later", num, weights=weights)
            rest, _ = batches(daemon, "later", 12 - num, state, weights=weights)
            assert same(first + rest, whole)
    books, state = batches(daemon, "later", 2, state, weights={"books": 1.0})
    assert {source_of(each) for each in values(books)} == {"books"}
    again, _ = batches(daemon, "later", 2, state, weights=WEIGHTS)
    assert {source_of(each) for each in values(again)} == set(WEIGHTS)


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
