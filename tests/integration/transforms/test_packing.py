"""Packed sequences through real daemons: every document once, whatever becomes of the ranks."""

import io
import tarfile
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

from tests.batches import same
from tests.conftest import StartDaemon
from tests.daemons import status
from tests.elastic import Stage, in_stages
from tests.packing import Documents, check_packed, documents, joined
from tests.token_files import megatron_idx

LENGTH, PADDING = 64, 7
DOCUMENTS = documents(500)


def write_parquet(folder: Path) -> Path:
    folder.mkdir()
    for number in range(2):
        half = [each.tolist() for each in DOCUMENTS[number * 250 : (number + 1) * 250]]
        table = pa.table({"tokens": pa.array(half, pa.list_(pa.int32())), "id": range(len(half))})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=40)
    return folder


def write_tar(folder: Path) -> Path:
    folder.mkdir()
    with tarfile.open(folder / "0.tar", "w") as archive:
        for number, each in enumerate(DOCUMENTS):
            file = io.BytesIO()
            np.save(file, each)
            member = tarfile.TarInfo(f"{number:04}.npy")
            member.size = file.tell()
            archive.addfile(member, io.BytesIO(file.getvalue()))
    return folder


def write_text(folder: Path) -> Path:
    folder.mkdir()
    texts = ["ä" * (len(each) // 2) for each in DOCUMENTS]
    pq.write_table(pa.table({"text": texts}), folder / "0.parquet", row_group_size=100)
    return folder


def write_megatron(folder: Path) -> Path:
    folder.mkdir()
    np.concatenate(DOCUMENTS).astype("<u2").tofile(folder / "ids.bin")
    lengths = [len(each) for each in DOCUMENTS]
    index = megatron_idx(lengths, 2, 8, range(len(lengths) + 1))
    (folder / "ids.idx").write_bytes(index)
    return folder / "ids.bin"


def expected(overlong: str, whole: Documents) -> dict[int, list[int]]:
    """The ids of each document that is in sequences."""
    cut = {"split": None, "truncate": LENGTH, "drop": LENGTH}[overlong]
    return {
        number: each[:cut].tolist()
        for number, each in enumerate(whole)
        if len(each) and (overlong != "drop" or len(each) <= LENGTH)
    }


@pytest.mark.parametrize(
    ("write", "field", "overlong"),
    [
        (write_parquet, "tokens", "split"),
        (write_megatron, "tokens", "truncate"),
        (write_tar, "npy", "drop"),
        (write_text, "text", "split"),
    ],
)
def test_every_document_is_served_once_in_an_epoch(
    tmp_path: Path, write: object, field: str, overlong: str
) -> None:
    assert callable(write)
    whole = DOCUMENTS
    if field == "text":
        whole = [np.frombuffer(("ä" * (len(each) // 2)).encode(), np.uint8) for each in DOCUMENTS]
    pack = {"field": field, "length": LENGTH, "overlong": overlong, "padding_id": PADDING}
    keys: dict[str, Any] = {}
    if write is write_megatron:
        keys = {"format": "tokens", "options": {"samples": "documents", "vocabulary": 30_000}}
    path = write(tmp_path / "data")
    with Loader(path, batch_size=4, tail="pad", pack=pack, **keys) as loader:
        for _ in range(2):
            found: dict[int, list[list[int]]] = {}
            for batch in loader:
                rows = int(batch["mask"].sum())
                parts = check_packed(batch, field, PADDING)
                for number, ids in parts[: int(batch["document_id.offsets"][rows])]:
                    found.setdefault(number, []).append(ids.tolist())
            # the parts of a document may come in any order, and all but the last are full
            served = {number: sorted(map(tuple, parts)) for number, parts in found.items()}
            assert served == {
                number: sorted(
                    tuple(ids[begin : begin + LENGTH]) for begin in range(0, len(ids), LENGTH)
                )
                for number, ids in expected(overlong, whole).items()
            }


def test_global_batches_are_the_same_on_any_ranks_through_kills(
    gyred: StartDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = {"field": "tokens", "length": LENGTH, "overlong": "split"}
    folder = write_parquet(tmp_path / "data")
    daemon = gyred(
        {"datasets": {"docs": {"uri": str(folder)}, "packed": {"uri": str(folder), "pack": pack}}}
    )

    def loader(rank: int, world_size: int, dataset: str = "docs") -> Loader:
        return Loader(
            dataset,
            batch_size=24,
            seed=3,
            rank=rank,
            world_size=world_size,
            address=daemon.address,
            pack=pack if dataset == "docs" else None,
        )

    num_steps = 24
    with loader(0, 1, "packed") as alone:
        whole = [joined([batch]) for batch in islice(alone.stream(), num_steps)]
        assert num_steps > len(alone)  # more than an epoch
    stages = [Stage(1, 5, kill_before=3), Stage(4, 6, 3), Stage(3, 7, 3), Stage(2, 6, 3)]
    got, state = in_stages(daemon, loader, stages, joined)
    assert same(got, whole)
    balance: dict[str, object] = {"linear": 1, "quadratic": 1, "field": "tokens"}
    balanced = [
        Loader(
            "packed",
            batch_size=24,
            seed=3,
            rank=rank,
            world_size=3,
            address=daemon.address,
            balance=balance,
        )
        for rank in range(3)
    ]
    costs = []
    for step in range(4):
        parts = [next(each) for each in balanced]
        shared = torch.cat([part["sample_id"] for part in parts])
        assert sorted(shared.tolist()) == sorted(whole[step]["sample_id"].tolist())
        for part in parts:
            check_packed(part, "tokens", 0)
        costs.append(
            [
                sum(len(ids) + len(ids) ** 2 for _, ids in check_packed(part, "tokens", 0))
                for part in parts
            ]
        )
    assert all(max(each) < 1.02 * sum(each) / 3 for each in costs)
    keys = [f"--balance={key}={value}" for key, value in balance.items()]
    flags = ["--batch-size", "24", "--world-size", "3", "--rank", "2", "--seed", "3"]
    plan = ["plan", "packed", "--address", daemon.address, *flags, "--step", "0"]
    assert main([*plan, *keys]) == 0
    shown = capsys.readouterr().out
    assert f"exceeds the mean by {3 * max(costs[0]) / sum(costs[0]) - 1:.2%}" in shown
    live = next(each for each in status(daemon).sessions if each.reader.world_size == 3)
    assert main([*plan[:-1], str(live.next_step - 1), *keys]) == 0
    assert f"exceeds the mean by {live.spread:.2%}" in capsys.readouterr().out
    described = ["describe", "packed", "--address", daemon.address]
    assert main(described) == 0
    assert f"of which {live.filled:.2%} is filled" in capsys.readouterr().out
    assert main(["status", "--address", daemon.address]) == 0
    assert f"{live.filled:.2%}" in capsys.readouterr().out
    with pytest.raises(CursorRejected, match="other data"):
        other = Loader(
            "docs", batch_size=24, seed=3, address=daemon.address, pack={**pack, "length": 65}
        )
        other.load_state_dict(state)
        next(iter(other))


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "data")
    wrong: dict[str, dict[str, object]] = {
        "overlong": {"field": "tokens", "length": 64},
        "there are tokens": {"field": "id", "length": 64, "overlong": "drop"},
        "padding_id is 2147483648": {"field": "tokens", "length": 999, "padding_id": 1 << 31},
        "pack.length is 0": {"field": "tokens", "length": 0},
        "did you mean `overlong`": {"field": "tokens", "length": 9, "overlon": "drop"},
        "`length` is missing": {"field": "tokens"},
    }
    for text, pack in wrong.items():
        with pytest.raises((InvalidRequest, ConfigError), match=text):
            Loader(folder, batch_size=1, pack=pack)
    masked = tmp_path / "masked.parquet"
    pq.write_table(pa.table({"tokens": [[1, 2], [3]], "loss_mask": [[0, 1], [1]]}), masked)
    with pytest.raises(InvalidRequest, match="no mask of a transform"):
        Loader(masked, batch_size=1, pack={"field": "tokens", "length": 8})
    with pytest.raises(InvalidRequest, match="no blocks"):
        blocks = Loader(
            folder, batch_size=1, order="block", pack={"field": "tokens", "length": 200}
        )
        next(iter(blocks))


def test_describe_says_how_full_sequences_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_parquet(tmp_path / "data")
    pack = ["--pack", "field=tokens", "--pack", f"length={LENGTH}"]
    assert main(["describe", str(folder), *pack, "--pack", "overlong=truncate"]) == 0
    shown = capsys.readouterr().out
    num_overlong = sum(len(each) > LENGTH for each in DOCUMENTS)
    num_empty = sum(not len(each) for each in DOCUMENTS)
    assert f"500 documents by tokens into sequences of {LENGTH}, of which 9" in shown
    assert f"{num_overlong} longer ones cut short; {num_empty} empty ones left out" in shown
    assert main(["plan", str(folder), *pack, "--batch-size", "2", "--cost"]) == 2
    assert "overlong" in capsys.readouterr().err
