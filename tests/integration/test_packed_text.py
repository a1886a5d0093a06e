"""Text that is tokenised and packed: what comes out is what packs when the ids are stored."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import CursorRejected, InvalidRequest
from tokenizers import Tokenizer

from tests.batches import Batch, same, take
from tests.conftest import Daemon, StartDaemon
from tests.packing import check_packed
from tests.tokenizers import make_tokenizer

LENGTH, END, NUM_SHARDS, PER_SHARD = 48, 1, 3, 70
WORDS = ("cat", "the mat", "hello world", "ä", "no", "answer is")
PACK = {"field": "tokens", "length": LENGTH, "overlong": "split"}


def texts(num: int = NUM_SHARDS * PER_SHARD) -> list[str]:
    """Texts of many lengths; one of them is empty, and some are longer than a sequence."""
    generator = np.random.default_rng(4)
    counts = np.minimum(generator.lognormal(1.6, 1.0, num).astype(int), 60)
    counts[5] = 0
    return [" ".join(generator.choice(WORDS, count)) for count in counts]


def write_lines(folder: Path, documents: Sequence[str]) -> Path:
    folder.mkdir()
    for number in range(NUM_SHARDS):
        some = documents[number * PER_SHARD : (number + 1) * PER_SHARD]
        lines = "".join(json.dumps({"text": each}) + "\n" for each in some)
        (folder / f"{number}.jsonl").write_text(lines)
    return folder


def write_parquet(path: Path, name: str, values: Any) -> Path:
    path.mkdir()
    pq.write_table(pa.table({name: values}), path / "0.parquet", row_group_size=40)
    return path


def tokenize(folder: Path, **options: Any) -> dict[str, Any]:
    path = str(folder / "tokenizer.json")
    return {"name": "tokenize", "tokenizer": path, "end": END, **options}


def joined(parts: list[Batch]) -> Batch:
    """A global batch of the parts of all ranks."""
    return {
        name: torch.cat([part[name] for part in parts])
        for name in parts[0]
        if not name.startswith("cu_seqlens") and not name.endswith(".offsets")
    }


@pytest.fixture
def served(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    """A daemon with three datasets of the same documents: two of text, and one of ids."""
    tokenizer = Tokenizer.from_file(str(make_tokenizer(tmp_path / "tokenizer.json")))
    documents = texts()
    ids = [[*tokenizer.encode(each).ids, END] for each in documents]
    lines = write_lines(tmp_path / "lines", documents)
    columns = write_parquet(tmp_path / "columns", "text", pa.array(documents))
    stored = write_parquet(tmp_path / "ids", "tokens", pa.array(ids, pa.list_(pa.int32())))
    tables = {
        "lines": {
            "uri": str(lines),
            "transforms": [tokenize(tmp_path, field="json", key="text")],
        },
        "columns": {"uri": str(columns), "transforms": [tokenize(tmp_path, field="text")]},
        "ids": {"uri": str(stored)},
    }
    return gyred({"num_transform_workers": 2, "datasets": tables})


def test_global_batches_are_those_of_stored_ids_on_any_ranks_through_kills(
    served: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loader(dataset: str, rank: int = 0, world_size: int = 1, **keys: Any) -> Loader:
        ranks: dict[str, Any] = {"rank": rank, "world_size": world_size, "address": served.address}
        return Loader(dataset, batch_size=6, seed=3, pack=PACK, **ranks, **keys)

    num_steps = 13
    with loader("ids") as alone, loader("columns") as columns:
        assert num_steps > len(alone) == len(columns)  # more than an epoch
        wanted = take(alone, num_steps)
        assert same(take(columns, num_steps), wanted)
    state: dict[str, Any] = {}
    got = []
    for world_size, steps in ((1, 4), (3, 5), (2, 4)):
        ranks = [loader("lines", rank, world_size) for rank in range(world_size)]
        for each in ranks:
            if state:
                each.load_state_dict(state)
        streams = [each.stream() for each in ranks]
        for step in range(steps):
            if step == world_size == 3:
                served.kill()
                served.restart()
            got.append(joined([next(stream) for stream in streams]))
        states = [each.state_dict() for each in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
        for each in ranks:
            each.close()
    assert same(got, [joined([batch]) for batch in wanted])
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    whole = [[*library.encode(each).ids, END] for each in texts()]
    for batch in wanted[:4]:
        for number, ids in check_packed(batch, "tokens", 0):
            cut = [whole[number][at : at + LENGTH] for at in range(0, len(whole[number]), LENGTH)]
            assert ids.tolist() in cut
    measured = [each["shard"] for each in served.events() if each["event"] == "shard measured"]
    assert sorted(measured) == ["0.jsonl", "0.parquet", "1.jsonl", "2.jsonl"]  # once, for all
    assert main(["index", "lines", "--address", served.address]) == 0
    assert "of 3 shards, 3 of them measured before" in capsys.readouterr().out
    with pytest.raises(CursorRejected, match="other data"):
        loader("ids").load_state_dict(state)


def test_lengths_decide_layouts_and_shares_of_ranks(served: Daemon, tmp_path: Path) -> None:
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = [[*library.encode(each).ids, END] for each in texts()]
    rule: dict[str, Any] = {"linear": 1, "quadratic": 0, "field": "tokens"}
    ranks = [
        Loader(
            "columns", batch_size=32, rank=rank, world_size=2, address=served.address, balance=rule
        )
        for rank in range(2)
    ]
    for _ in range(3):
        parts = [next(each) for each in ranks]
        for part in parts:
            ends = part["tokens.offsets"].tolist()
            for number, sample in enumerate(part["sample_id"].tolist()):
                assert part["tokens"][ends[number] : ends[number + 1]].tolist() == ids[sample]
        costs = [len(part["tokens"]) for part in parts]
        assert max(costs) < 1.05 * sum(costs) / 2
    for each in ranks:
        each.close()
    with pytest.raises(InvalidRequest, match=r"the transforms do not make; .* they make tokens"):
        Loader("lines", batch_size=4, address=served.address, pack={**PACK, "field": "json"})
