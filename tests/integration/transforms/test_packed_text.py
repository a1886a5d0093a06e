"""Text that is tokenised and packed: what comes out is what packs when the ids are stored."""

import itertools
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import CursorRejected, InvalidRequest
from tokenizers import Tokenizer

from tests.batches import same, take
from tests.conftest import Daemon, StartDaemon
from tests.elastic import Stage, in_stages
from tests.packing import check_packed, joined
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


@pytest.mark.parametrize("tail", ["wrap", "drop"])
def test_global_batches_are_those_of_stored_ids_on_any_ranks_through_kills(
    served: Daemon,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tail: str,
) -> None:
    def loader(dataset: str, rank: int = 0, world_size: int = 1, **keys: Any) -> Loader:
        ranks: dict[str, Any] = {"rank": rank, "world_size": world_size, "address": served.address}
        return Loader(dataset, batch_size=6, seed=3, tail=tail, pack=PACK, **ranks, **keys)

    num_steps = 13
    with loader("ids") as alone, loader("columns") as columns:
        assert num_steps > len(alone) == len(columns)  # more than an epoch
        wanted = take(alone, num_steps)
        assert same(take(columns, num_steps), wanted)
        assert {batch["tokens"].shape[1] for batch in wanted} == {LENGTH}
    stages = [Stage(1, 4), Stage(3, 5, kill_before=3), Stage(2, 4)]
    got, state = in_stages(served, partial(loader, "lines"), stages, joined)
    assert same(got, [joined([batch]) for batch in wanted])
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    whole = [[*library.encode(each).ids, END] for each in texts()]
    for batch in wanted[:4]:
        for number, ids in check_packed(batch, "tokens", 0, LENGTH):
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


def test_conversations_are_packed_with_their_masks(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    config = json.dumps({"chat_template": template})
    (tmp_path / "tokenizer_config.json").write_text(config)
    said = texts(60)
    talks = [
        {
            "messages": [
                {"role": "user", "content": said[number]},
                {"role": "assistant", "content": said[-1 - number]},
            ]
        }
        for number in range(30)
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in talks))
    chat = [{"name": "chat", "field": "json", "tokenizer": str(tokenizer)}]
    wanted: dict[int, tuple[list[int], list[bool]]] = {}
    with Loader(tmp_path / "talks.jsonl", batch_size=5, transform=chat) as loader:
        for batch in loader:
            bounds = batch["tokens.offsets"].tolist()
            for row, number in enumerate(batch["sample_id"].tolist()):
                some = slice(bounds[row], bounds[row + 1])
                mask = batch["loss_mask"][some].tolist()
                wanted[number] = batch["tokens"][some].tolist(), mask
    assert 0.2 < np.mean([value for _, mask in wanted.values() for value in mask]) < 0.9
    found: dict[int, list[tuple[list[int], list[bool]]]] = {}
    with Loader(
        tmp_path / "talks.jsonl", batch_size=2, tail="drop", transform=chat, pack=PACK, epochs=1
    ) as loader:
        for batch in loader:
            own, position = batch["loss_mask"], batch["position"]
            filled = batch["tokens"] > 0  # padding is 0, which no text has
            for number, ids in check_packed(
                {**batch, "loss_mask": (position > 0) & filled}, "tokens", 0
            ):
                found.setdefault(number, []).append((ids.tolist(), []))
            flat, ends = own.reshape(-1).tolist(), batch["cu_seqlens"].tolist()
            masks = [
                flat[begin:end]
                for begin, end in itertools.pairwise(ends)
                if filled.reshape(-1)[begin]
            ]
            for number, mask in zip(batch["document_id"].tolist(), masks, strict=True):
                next(part for part in found[number] if not part[1])[1].extend(mask)
            assert not own[~filled].any()
    assert len(found) > 20
    for number, parts in found.items():
        talk, mask = wanted[number]
        for part, counts in parts:
            begin = next(b for b in range(0, len(talk), LENGTH) if talk[b : b + LENGTH] == part)
            assert counts == [False, *mask[begin + 1 : begin + LENGTH]]
