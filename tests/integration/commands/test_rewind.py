"""`gyre rewind`: the samples behind steps of a run, where they are stored, and what they are."""

import base64
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader
from gyre_client.command.cli import main

from tests.batches import take
from tests.conftest import StartDaemon
from tests.mixtures import FIRST, text_of, write_sources
from tests.packing import documents
from tests.tokenizers import make_tokenizer

G = 4
Rewind = Callable[..., tuple[int, str]]


@pytest.fixture
def rewind(capsys: pytest.CaptureFixture[str]) -> Rewind:
    def run(*arguments: object) -> tuple[int, str]:
        status = main(["rewind", *map(str, arguments)])
        found = capsys.readouterr()
        return status, found.out + found.err

    return run


def test_a_mixture_of_filtered_sources(gyred: StartDaemon, tmp_path: Path, rewind: Rewind) -> None:
    sources = write_sources(tmp_path / "data")
    sources["code"]["filter"] = "length(text) >= 5"
    mixture = {"weights": {"web": 1, "code": 1}, "block": 8}
    daemon = gyred({"datasets": sources, "mixtures": {"all": mixture}})
    with Loader("all", batch_size=G, seed=3, address=daemon.address, skip_steps=[(3, 5)]) as loader:
        batches = take(loader, 8)
        (tmp_path / "cursor").write_bytes(loader.state_dict()["cursor"])
    flags = ("--dataset", "all", "--address", daemon.address)
    status, text = rewind(tmp_path / "cursor", "--step", "2:7", *flags, "--json")
    assert status == 0, text
    found = json.loads(text)
    assert found["skip_steps"] == [[2, 7]]
    assert [each["skipped"] for each in found["steps"]] == [
        False,
        True,
        True,
        False,
        False,
    ]
    for number, step in ((2, 0), (3, 3), (4, 4)):
        its = found["steps"][step]
        for row, value in zip(its["rows"], batches[number]["id"].tolist(), strict=True):
            (sample,) = row["samples"]
            source = its["sources"][sample["source"]]
            own, half = value - FIRST[source], {"web": 45, "code": 20}[source]
            assert its["shards"][sample["shard"]].startswith(str(own // half))
            assert sample["row"] == own % half  # also behind a filter
            # of Parquet, chunks are decoded
            assert (sample["offset"] is None) == (source == "web")
        shown = [text_of(each) for each in batches[number]["id"].tolist()[:2]]
        assert [each["text"] for each in its["shown"]] == shown
    status, text = rewind(tmp_path / "cursor", "--step", "5", *flags, "--num", "0")
    assert status == 0
    assert "step 5, epoch 0" in text
    assert "skip_steps=[(3, 6)]" in text
    assert "data.skip_steps = [[3, 6]]" in text


def test_a_run_of_packed_documents(gyred: StartDaemon, tmp_path: Path, rewind: Rewind) -> None:
    texts = [f"{number} " + "word " * len(each) for number, each in enumerate(documents(40))]
    (tmp_path / "docs").mkdir()
    pq.write_table(pa.table({"text": texts}), tmp_path / "docs" / "0.parquet")
    pack = {"field": "text", "length": 300, "overlong": "split"}
    dataset = {"uri": str(tmp_path / "docs"), "pack": pack}
    daemon = gyred({"datasets": {"packed": dataset, "docs": {"uri": str(tmp_path / "docs")}}})
    with Loader("packed", batch_size=G, address=daemon.address, skip_steps=[(1, 3)]) as loader:
        batches = take(loader, 3)
        cursor = loader.state_dict()["cursor"]
    run = tmp_path / "run"
    write_run(run, cursor, [batch["sample_id"].tolist() for batch in batches])
    status, text = rewind(run, "--step", "1:3", "--address", daemon.address, "--json")
    assert status == 0, text
    found = json.loads(text)
    assert [step["step"] for step in found["steps"]] == [3, 4]
    assert [step["is_in_history"] for step in found["steps"]] == [True, True]
    for number, step in ((1, 0), (2, 1)):
        its, batch = found["steps"][step], batches[number]
        bounds = batch["document_id.offsets"].tolist()
        for row in range(G):
            samples = its["rows"][row]["samples"]
            ids = batch["document_id"][bounds[row] : bounds[row + 1]].tolist()
            assert [each["sample_id"] for each in samples] == ids
            parts = [
                texts[each["sample_id"]].encode()[each["first_token"] :][: each["num_tokens"]]
                for each in samples
            ]
            assert bytes(batch["text"][row].tolist()).startswith(b"".join(parts))
    status, text = rewind(run, "--step", "1:3", "--address", daemon.address)
    assert "step 1 of the run, step 3 of the data's order, epoch 0, loss 1.0000" in text
    assert "the history has the same samples" in text
    assert "resume from the checkpoint step-00000001 or an earlier one" in text
    assert "skip_steps=[(1, 5)]" in text
    write_run(run, cursor, [[1, 2, 3, 4]] * 3)
    status, text = rewind(run, "--step", "1", "--address", daemon.address)
    assert "THE HISTORY HAS OTHER SAMPLES" in text
    status, text = rewind(run, "--step=1", "--address", daemon.address, "--dataset=docs")
    assert (status, "belongs to other data" in text) == (1, True)


TOKENIZE = {"name": "tokenize", "field": "text", "tokenizer": "bytes", "end": 256}
PACK = ("--pack=field=tokens", "--pack=length=64", "--pack=overlong=split")


@pytest.fixture
def chains(tmp_path: Path) -> dict[str, tuple[str, str]]:
    """The option `--transforms` with the script's own chain, in two formats, and with another."""
    other = {**TOKENIZE, "end": 257}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in TOKENIZE.items())
    texts = {
        "own.json": json.dumps([TOKENIZE]),
        "own.toml": f"[[transforms]]\n{lines}\n",
        "other.json": json.dumps([other]),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: ("--transforms", str(tmp_path / name)) for name in texts}


def test_a_script_that_declares_its_transforms_itself(
    gyred: StartDaemon,
    tmp_path: Path,
    rewind: Rewind,
    chains: dict[str, tuple[str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = [f"{number} " + "word " * (len(each) % 40) for number, each in enumerate(documents(60))]
    (tmp_path / "docs").mkdir()
    pq.write_table(pa.table({"text": texts}), tmp_path / "docs" / "0.parquet")
    plain: dict[str, Any] = {"uri": str(tmp_path / "docs")}
    defined = {**plain, "transforms": [{**TOKENIZE, "end": 258}]}
    daemon = gyred({"num_transform_workers": 1, "datasets": {"docs": plain, "defined": defined}})
    keys: dict[str, Any] = {"batch_size": G, "address": daemon.address, "transform": [TOKENIZE]}
    pack = {"field": "tokens", "length": 64, "overlong": "split"}
    with Loader("docs", pack=pack, **keys) as loader:
        batch = take(loader, 3)[2]
        (tmp_path / "cursor").write_bytes(loader.state_dict()["cursor"])
    whole = [[*each.encode(), 256] for each in texts]
    step = (tmp_path / "cursor", "--step", "2", "--address", daemon.address, *PACK)
    for dataset, name in (("docs", "own.json"), ("docs", "own.toml"), ("defined", "own.json")):
        status, text = rewind(*step, "--dataset", dataset, *chains[name], "--json")
        assert status == 0, text
        (found,) = json.loads(text)["steps"]
        bounds = batch["document_id.offsets"].tolist()
        for row in range(G):
            its = found["rows"][row]
            assert its["sample_id"] == int(batch["sample_id"][row])
            ids = batch["document_id"][bounds[row] : bounds[row + 1]].tolist()
            assert [each["sample_id"] for each in its["samples"]] == ids
            parts = [
                whole[each["sample_id"]][each["first_token"] :][: each["num_tokens"]]
                for each in its["samples"]
            ]
            tokens = [*itertools.chain.from_iterable(parts)]
            assert batch["tokens"][row].tolist()[: len(tokens)] == tokens
        for row, shown in enumerate(found["shown"]):
            assert shown["tokens"].startswith(first_of(batch["tokens"][row].tolist()))
    refused: list[tuple[tuple[str, ...], int, str]] = [
        (("docs", *chains["other.json"]), 1, "transformed otherwise"),
        (("docs", *chains["other.json"]), 1, "takes the list of its Loader(transform=...)"),
        (("defined",), 1, "takes the list of its Loader(transform=...)"),
        (("docs",), 2, "`pack` names the field 'tokens'"),
    ]
    for (dataset, *more), code, message in refused:
        status, text = rewind(*step, "--dataset", dataset, *more)
        assert (status, message in text) == (code, True), text
    plan = ["plan", "--address", daemon.address, "--batch-size", str(G), "--step", "2", *PACK]
    for dataset, name in (("docs", "own.toml"), ("defined", "own.json")):
        assert main([*plan, dataset, *chains[name], "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert planned["sample_ids"] == batch["sample_id"].tolist()

    with Loader("docs", bucket={"field": "tokens"}, tail="drop", **keys) as loader:
        batch = take(loader, 2)[1]
        (tmp_path / "cursor").write_bytes(loader.state_dict()["cursor"])
    flags = ("--address", daemon.address, "--dataset", "defined")
    bucketed = (tmp_path / "cursor", "--step", "1", *flags)
    status, text = rewind(*bucketed, *chains["own.json"], "--json", "--num", G)
    assert status == 0, text
    (found,) = json.loads(text)["steps"]
    ids = batch["sample_id"].tolist()
    assert [each["sample_id"] for each in found["rows"]] == ids
    for sample, shown in zip(ids, found["shown"], strict=True):
        assert shown["tokens"].startswith(first_of(whole[sample]))
    status, text = rewind(*bucketed)
    assert (status, "takes the list of its Loader(transform=...)" in text) == (1, True), text

    with Loader("docs", **keys) as loader:
        ids = take(loader, 1)[0]["sample_id"].tolist()
        (tmp_path / "cursor").write_bytes(loader.state_dict()["cursor"])
    first = (tmp_path / "cursor", "--step", "0", *flags)
    cases: list[tuple[tuple[str, ...], int]] = [
        ((), 0),  # the order is the same with any
        (chains["own.json"], 0),
        (chains["other.json"], 1),
    ]
    for own, code in cases:
        status, text = rewind(*first, *own)
        assert status == code, text
        if not code:
            assert texts[ids[0]].rstrip() in text


def test_a_path_and_the_file_of_a_tokenizer(
    private_daemon: None, tmp_path: Path, rewind: Rewind
) -> None:
    texts = ["cat the mat " * (1 + each % 5) for each in range(30)]
    (tmp_path / "docs").mkdir()
    pq.write_table(pa.table({"text": texts}), tmp_path / "docs" / "0.parquet")
    path = str(make_tokenizer(tmp_path / "tokenizer.json"))
    chain = [{"name": "tokenize", "field": "text", "tokenizer": path, "end": 1}]
    (tmp_path / "chain.json").write_text(json.dumps(chain))
    pack: dict[str, Any] = {"field": "tokens", "length": 64, "overlong": "split"}
    docs = str(tmp_path / "docs")
    with Loader(docs, batch_size=G, transform=chain, pack=pack) as loader:
        batch = next(loader)
        (tmp_path / "cursor").write_bytes(loader.state_dict()["cursor"])
    flags = ("--dataset", docs, "--transforms", tmp_path / "chain.json", *PACK)
    status, text = rewind(tmp_path / "cursor", "--step", "0", *flags, "--json", "--num", "1")
    assert status == 0, text
    (found,) = json.loads(text)["steps"]
    ids = [each["sample_id"] for row in found["rows"] for each in row["samples"]]
    assert ids == batch["document_id"].tolist()
    more = ("--tokenizer", path, "--num", "1")
    status, text = rewind(tmp_path / "cursor", "--step", "0", *flags, *more)
    assert status == 0, text
    lines = text.splitlines()
    decoded = [lines[at - 1].split()[0] for at, line in enumerate(lines) if line[:4] == "    "]
    assert decoded == ["tokens"], "and not the positions"
    status, text = rewind(tmp_path / "cursor", "--step", "0", "--dataset", docs)
    assert (status, "give them: --option, --pack, --transforms" in text) == (1, True), text


def first_of(tokens: list[int]) -> str:
    """How what is shown of these begins."""
    return f"[{', '.join(map(str, tokens[:8]))}"


def test_the_options_of_a_run_are_those_of_its_data(tmp_path: Path, rewind: Rewind) -> None:
    """Of a path, by a private daemon; what is given on the command line replaces them."""
    texts = [f"{number} " + "word " * (len(each) % 40) for number, each in enumerate(documents(60))]
    (tmp_path / "docs").mkdir()
    pq.write_table(pa.table({"text": texts}), tmp_path / "docs" / "0.parquet")
    options = {
        "transforms": [TOKENIZE],
        "pack": {"field": "tokens", "length": 64, "overlong": "split"},
    }
    with Loader(str(tmp_path / "docs"), batch_size=G, options=options) as loader:
        ids = [next(loader)["sample_id"].tolist() for _ in range(3)]
        cursor = loader.state_dict()["cursor"]
    place = {"dataset": str(tmp_path / "docs"), "format": "parquet"}
    run = tmp_path / "run"
    write_run(run, cursor, ids, {**place, "options": json.dumps(options)})
    status, text = rewind(run, "--step", "1")
    assert (status, "the history has the same samples" in text) == (0, True), text
    status, text = rewind(run, "--step", "1", "--option", "filter=length(text) > 90")
    assert (status, "belongs to other data" in text) == (1, True), text

    foreign = {"transforms": [{"name": "os:system"}]}
    write_run(run, cursor, ids, {**place, "options": json.dumps(foreign)})
    status, text = rewind(run, "--step", "1")
    assert (status, "a run's files run no code" in text) == (2, True), text
    for mine in ({"storage": {"endpoint": "http://127.0.0.1:9"}}, {"follow_links": True}):
        write_run(run, cursor, ids, {**place, "options": json.dumps(options | mine)})
        status, text = rewind(run, "--step", "1")
        (key,) = mine
        assert (status, f"Give it again, with --option '{key}=...'" in text) == (2, True), text
    status, text = rewind(run, "--step", "1", "--option", "follow_links=true")
    assert (status, "the history has the same samples" in text) == (0, True), text
    write_run(run, cursor, ids, {**place, "options": "[1]"})
    status, text = rewind(run, "--step", "1")
    assert (status, "describes its data wrongly" in text) == (2, True), text


def write_run(
    folder: Path, cursor: bytes, ids: list[list[int]], data: dict[str, str] | None = None
) -> None:
    """What `gyre-train` leaves of a run, as far as `gyre rewind` reads it."""
    data = data or {"dataset": "packed", "format": ""}
    for step in (1, 3):
        checkpoint = folder / "checkpoints" / f"step-{step:08}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        manifest: dict[str, Any] = {"step": step, "data": data}
        manifest["loader"] = {"cursor": base64.b64encode(cursor).decode()}
        (checkpoint / "checkpoint.json").write_text(json.dumps(manifest))
    (folder / "checkpoints" / "latest").write_text("step-00000003\n")
    records = []
    for step, each in enumerate(ids):
        digest = hashlib.sha256("".join(f"{one}\n" for one in each).encode()).hexdigest()[:16]
        records.append(json.dumps({"step": step, "loss": float(step), "sample_ids": digest}))
    (folder / "history.jsonl").write_text("\n".join([*records[:2], records[1], *records[2:]]))


def test_tokens_are_decoded_and_what_is_no_run_is_refused(
    gyred: StartDaemon, tmp_path: Path, rewind: Rewind
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"north": 0, "south": 1}, unk_token="north"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "ids").mkdir()
    np.tile(np.array([1, 0, 0, 1], np.uint16), 20).tofile(tmp_path / "ids" / "0.bin")
    tokens = {"uri": str(tmp_path / "ids"), "format": "tokens", "dtype": "uint16"}
    daemon = gyred({"datasets": {"ids": {**tokens, "sequence_length": 4}}})
    with Loader("ids", batch_size=G, address=daemon.address) as loader:
        (tmp_path / "cursor").write_bytes(loader.state_dict()["cursor"])
    flags = ("--dataset", "ids", "--address", daemon.address)
    more = ("--tokenizer", tmp_path / "words.json", "--num", "1")
    status, text = rewind(tmp_path / "cursor", "--step", "1", *flags, *more)
    assert status == 0, text
    assert "south north north south" in text
    (tmp_path / "garbage").write_bytes(b"no cursor")
    wrong: list[tuple[tuple[object, ...], str]] = [
        ((tmp_path / "garbage", "--step", "1"), "has no cursor of a Loader's state"),
        ((tmp_path, "--step", "1"), "no folder of a run with a checkpoint"),
        ((tmp_path / "cursor", "--step", "1:900"), "no range of 1 to 100 steps"),
        ((tmp_path / "cursor", "--step", str(1 << 50)), "up to 2**40"),
    ]
    for arguments, message in wrong:
        status, text = rewind(*arguments, *flags)
        assert (status, message in text) == (2, True), text
    status, text = rewind(tmp_path / "cursor", "--step", "1", "--address", daemon.address)
    assert (status, "give --dataset" in text) == (2, True)
