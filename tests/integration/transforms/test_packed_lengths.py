"""Packing into several lengths through real daemons, on ranks that come and go."""

import contextlib
import re
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import ConfigError, CursorRejected, InvalidRequest
from gyre_client.transport.address import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

from tests.batches import Batch, same
from tests.conftest import Daemon, StartDaemon
from tests.daemons import status
from tests.elastic import Stage, in_stages
from tests.packing import check_packed, documents, joined
from tests.token_files import megatron_idx

LENGTHS = [32, 64, 128]
G = 12
EVERY = documents(900, seed=3)
DOCUMENTS = [each for each in EVERY if len(each) >= 2]  # as the filter leaves them
PACK: dict[str, Any] = {"field": "tokens", "length": LENGTHS, "overlong": "split"}


@pytest.fixture
def served(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    """A daemon with documents of token ids, packed or not, and a mixture of them."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [each.tolist() for each in EVERY]
    pq.write_table(pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))}), folder / "0.parquet")
    docs = {"uri": str(folder), "filter": "length(tokens) >= 2"}
    tables = {
        "datasets": {"docs": docs, "packed": {**docs, "pack": PACK}},
        "mixtures": {"mix": {"epochs": {"docs": 1}}},
    }
    return gyred(tables)


def loader(daemon: Daemon, rank: int = 0, world_size: int = 1, **keys: Any) -> Loader:
    keys = {"dataset": "packed", "tail": "drop", **keys}
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
    dataset = keys.pop("dataset")
    return Loader(dataset, batch_size=G, seed=5, address=daemon.address, **ranks, **keys)


def check_documents(batches: list[Batch]) -> dict[int, list[int]]:
    """Checks that parts of documents have the stored tokens; returns those of each document."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for batch in batches:
        for document, ids in check_packed(batch, "tokens", 0, LENGTHS[0]):
            found.setdefault(document, []).append(tuple(ids.tolist()))
    whole = {}
    for document, parts in found.items():
        stored = DOCUMENTS[document].tolist()
        cut = [tuple(stored[at : at + 128]) for at in range(0, len(stored), 128)]
        assert set(parts) <= set(cut)
        whole[document] = stored if sorted(parts) == sorted(cut) else []
    return whole


def test_global_batches_are_the_same_on_any_ranks_through_kills(
    served: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    with loader(served) as alone:
        assert len(alone) == alone.num_samples // G
        num_steps = len(alone) + 4
        whole = list(islice(alone.stream(), num_steps))
    for batch in whole:
        rows, length = batch["tokens"].shape
        assert length in LENGTHS
        assert rows * length == G * 128
        assert batch["position"].shape == batch["loss_mask"].shape == (rows, length)
        assert batch["document_id.offsets"].shape == (rows + 1,)
        assert batch["sample_id"].shape == (G,)
    assert {batch["tokens"].shape[1] for batch in whole} == set(LENGTHS)
    check_documents(whole)
    stages = [Stage(1, 5, kill_before=3), Stage(3, 6, kill_before=4), Stage(2, num_steps - 11)]
    found, state = in_stages(served, partial(loader, served), stages, joined)
    assert same(found, [joined([batch]) for batch in whole])
    with (
        pytest.raises(CursorRejected, match="other data"),
        loader(served, dataset="docs", pack={**PACK, "length": [16, 64, 128]}) as other,
    ):
        other.load_state_dict(state)
        next(other)

    # the job says itself what the dataset's table says, and of what its buckets are
    bucket = {"field": "tokens", "window_batches": 64}
    with loader(served, dataset="docs", pack=PACK, bucket=bucket) as explicit:
        assert same(list(islice(explicit.stream(), 3)), whole[:3])

    located = pb.LocateStepRequest(
        dataset=pb.DatasetRef(name="packed"), cursor=state["cursor"], step=3
    )
    with Connection(parse_address(served.address)) as connection:
        answer = connection.locate_step(located)
    assert [row.sample_id for row in answer.rows] == whole[3]["sample_id"].tolist()
    assert answer.row_length == whole[3]["tokens"].shape[1]
    offsets = whole[3]["document_id.offsets"]
    rows_of = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff()).tolist()
    assert [each.batch_row for row in answer.rows for each in row.samples] == rows_of

    flags = ["--address", served.address, "--batch-size", str(G), "--seed", "5", "--tail", "drop"]
    assert main(["plan", "packed", *flags, "--step", f"0:{num_steps - 4}"]) == 0
    shown = capsys.readouterr().out
    for batch in whole[: num_steps - 4]:
        assert f"rows have {batch['tokens'].shape[1]} tokens" in shown
        assert " ".join(map(str, batch["sample_id"].tolist())) in shown
    num_mixed = shown.count("samples of the global batch have shorter sequences")
    assert num_mixed < len(LENGTHS)
    assert f"{num_mixed} of {num_steps - 4} steps have sequences of several lengths" in shown


def test_each_document_is_served_once_in_an_epoch(served: Daemon) -> None:
    with loader(served, tail="pad") as padded:
        batches = list(padded)
    last = batches[-1]
    num_rows = int(last["mask"].sum()) * len(last["tokens"]) // G
    parts: list[tuple[int, tuple[int, ...]]] = []
    for batch in batches:
        its = check_packed(batch, "tokens", 0, LENGTHS[0])
        if batch is last:
            its = its[: int(batch["document_id.offsets"][num_rows])]
        parts += [(document, tuple(ids.tolist())) for document, ids in its]
    assert sorted(parts) == [
        (document, tuple(stored[at : at + 128].tolist()))
        for document, stored in enumerate(DOCUMENTS)
        for at in sorted(range(0, len(stored), 128), key=lambda at: tuple(stored[at:].tolist()))
    ]


def test_ranks_cost_about_the_same_and_have_rows_of_one_length(
    served: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    with loader(served) as alone:
        whole = list(islice(alone, 6))
    balance = {"linear": 1, "quadratic": 1}
    spreads: dict[bool, list[float]] = {}
    for is_balanced in (False, True):
        its: dict[str, Any] = {"balance": balance} if is_balanced else {}
        with contextlib.ExitStack() as stack:
            ranks = [stack.enter_context(loader(served, rank, 3, **its)) for rank in range(3)]
            spreads[is_balanced] = [
                spread_of([next(each) for each in ranks], batch) for batch in whole
            ]
            live = next(each for each in status(served).sessions if each.reader.world_size == 3)
    assert sum(spreads[True]) < 0.6 * sum(spreads[False])
    flags = ["--address", served.address, "--batch-size", str(G), "--seed", "5", "--tail", "drop"]
    keys = [f"--balance={key}={value}" for key, value in balance.items()]
    assert main(["plan", "packed", *flags, "--step", "2", "--world-size", "3", *keys]) == 0
    assert f"exceeds the mean by {spreads[True][2]:.2%}" in capsys.readouterr().out
    assert main(["describe", "packed", "--address", served.address]) == 0
    shown = capsys.readouterr().out
    assert f"sequences of 32, 64 or 128, of which {live.filled:.2%} is filled" in shown
    assert re.search(r"there are [\d,]+ of 32, [\d,]+ of 64, [\d,]+ of 128", shown)
    assert shown.count("  tokens  int32 [128]  ") == 3  # a sample has its sequences back to back


def spread_of(parts: list[Batch], whole: Batch) -> float:
    """By how much the most expensive of the ranks' parts of a batch exceeds the mean."""
    assert {part["tokens"].shape[1] for part in parts} == {whole["tokens"].shape[1]}
    shared = torch.cat([part["sample_id"] for part in parts])
    assert sorted(shared.tolist()) == sorted(whole["sample_id"].tolist())
    costs = [
        sum(len(ids) + len(ids) ** 2 for _, ids in check_packed(part, "tokens", 0, LENGTHS[0]))
        for part in parts
    ]
    return 3 * max(costs) / sum(costs) - 1


def test_unsigned_ids_are_widened(tmp_path: Path) -> None:
    np.concatenate(DOCUMENTS).astype("<u2").tofile(tmp_path / "ids.bin")
    index = megatron_idx([len(each) for each in DOCUMENTS], 2, 8, range(len(DOCUMENTS) + 1))
    (tmp_path / "ids.idx").write_bytes(index)
    options = {"samples": "documents", "vocabulary": 30_000}
    keys: dict[str, Any] = {"format": "tokens", "options": options, "pack": PACK, "tail": "drop"}
    for dtype, expected in (("int64", torch.int64), ("stored", torch.uint16)):
        with Loader(tmp_path / "ids.bin", batch_size=2, token_dtype=dtype, **keys) as it:
            batch = next(it)
        assert batch["tokens"].dtype == expected
        batch["tokens"] = batch["tokens"].to(torch.int32)
        assert check_documents([batch])


def test_what_has_no_steps_of_one_length_is_refused(served: Daemon, tmp_path: Path) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "`pack` has the lengths 32, 64, 128.*Use the tail `drop` or `pad`": {"tail": "wrap"},
        "a packed dataset has no blocks": {"order": "block"},
        "bucket` names the field 'text'.*packed from 'tokens'": {"bucket": {"field": "text"}},
        "does not go with a `pack` of one length": {
            "dataset": "docs",
            "pack": {**PACK, "length": [64]},
            "bucket": {"field": "tokens"},
        },
        "a mixture is packed into sequences of one length": {"dataset": "mix", "pack": PACK},
        "48 does not divide 128": {"dataset": "docs", "pack": {**PACK, "length": [16, 48, 128]}},
        "16 stands behind 32": {"dataset": "docs", "pack": {**PACK, "length": [32, 16]}},
        "it names no length": {"dataset": "docs", "pack": {**PACK, "length": []}},
        "longer than 32 tokens": {
            "dataset": "docs",
            "pack": {"field": "tokens", "length": [16, 32]},
        },
    }
    for message, keys in wrong.items():
        with pytest.raises((InvalidRequest, ConfigError), match=message):
            next(loader(served, **keys))
    flags = ["--address", served.address, "--to", "parquet"]
    assert main(["convert", "packed", str(tmp_path / "out"), *flags]) == 2
    assert not (tmp_path / "out").exists()
