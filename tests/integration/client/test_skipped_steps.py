"""Steps that a job leaves out: on every rank, through kills and resumes, of any kind of dataset."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gyre_client import Loader
from gyre_client.errors import CursorRejected, InvalidRequest

from tests.batches import Batch, same, take
from tests.conftest import StartDaemon
from tests.elastic import Stage, in_stages
from tests.mixtures import write_sources
from tests.packing import documents, joined

G = 8
SKIPPED = [(3, 5), (9, 10)]
KEPT = [0, 1, 2, 5, 6, 7, 8, 10, 11, 12]


@pytest.mark.parametrize("name", ["mixed", "packed"])
def test_every_rank_leaves_them_out_and_the_state_keeps_it(
    gyred: StartDaemon, tmp_path: Path, name: str
) -> None:
    (tmp_path / "docs").mkdir()
    table = pa.table({"tokens": [each.tolist() for each in documents(200, seed=2)]})
    pq.write_table(table, tmp_path / "docs" / "0.parquet", row_group_size=40)
    pack = {"field": "tokens", "length": 128, "overlong": "split"}
    sources = write_sources(tmp_path / "data")
    daemon = gyred(
        {
            "datasets": {"packed": {"uri": str(tmp_path / "docs"), "pack": pack}, **sources},
            "mixtures": {"mixed": {"weights": {"web": 2, "code": 1}, "block": 20}},
        }
    )

    def whole_batch(parts: list[Batch]) -> Batch:
        if name == "packed":
            return joined(parts)
        return {key: torch.cat([part[key] for part in parts]) for key in ("id", "source")}

    def loader(rank: int, num_ranks: int, **keys: Any) -> Loader:
        keys |= {"rank": rank, "world_size": num_ranks, "address": daemon.address}
        return Loader(name, batch_size=G, seed=4, prefetch_batches=2, epochs=None, **keys)

    with loader(0, 1) as alone:
        whole = [whole_batch([batch]) for batch in take(alone, 13)]
    num_read = 0

    def check(ranks: list[Loader]) -> None:
        nonlocal num_read
        assert [each.step for each in ranks] == [KEPT[num_read]] * len(ranks)
        assert ranks[0].num_batches == num_read
        num_read += 1

    def open_rank(rank: int, num_ranks: int) -> Loader:
        # the state says it to the last one
        return loader(rank, num_ranks, **({"skip_steps": SKIPPED} if num_ranks > 1 else {}))

    stages = [Stage(2, 2), Stage(4, 4, kill_before=2), Stage(1, 4)]
    found, _ = in_stages(daemon, open_rank, stages, whole_batch, check)
    assert same(found, [whole[step] for step in KEPT])


def test_a_resume_can_leave_out_more_but_nothing_else(gyred: StartDaemon, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(100))
    daemon = gyred({"datasets": {"set": {"uri": str(tmp_path), "format": "npy"}}})

    def loader(**keys: Any) -> Loader:
        return Loader("set", batch_size=10, address=daemon.address, **keys)

    with loader() as plain:
        epochs = [[batch["sample_id"].tolist() for batch in plain] for _ in range(2)]
        with loader(skip_steps=[[8, 9], (4, 7), (6, 8)]) as less:
            # an iteration passes over the rest of an epoch: 4 to 8 are left out
            assert [batch["sample_id"].tolist() for batch in less] == [*epochs[0][:4], epochs[0][9]]
            assert (less.step, less.epoch) == (10, 1)
            assert less.state_dict()["cursor"].count(b"[[4,9]]") == 1
            less.set_epoch(0)
            assert next(less)["sample_id"].tolist() == epochs[0][0]
            less.set_epoch(1)
            assert next(less)["sample_id"].tolist() == epochs[1][0]
            state = less.state_dict()
    with loader(skip_steps=[(4, 9), (12, 30)]) as more:
        more.load_state_dict(state)
        assert next(more)["sample_id"].tolist() == epochs[1][1]
        assert (more.step, more.epoch) == (30, 3)
        # a whole epoch is left out, and no iteration belongs to it
        assert len(list(more)) == 10
    with loader(skip_steps=[(4, 9), (10, 12)]) as late, pytest.raises(CursorRejected) as refused:
        late.load_state_dict(state)
    assert "it leaves out the steps [(4, 9)], and skip_steps says [(4, 9), (10, 12)]" in str(
        refused.value
    )
    assert "it stands at step 11" in str(refused.value)
    with loader(skip_steps=[]) as none, pytest.raises(CursorRejected, match="name these steps too"):
        none.load_state_dict(state)
    with loader(job="one", rank=0, world_size=2, skip_steps=[(0, 2)]) as one:
        assert one.step == 2
        with (
            loader(job="one", rank=1, world_size=2) as other,
            pytest.raises(InvalidRequest, match=r"leaves out the steps \[\(0, 2\)\]"),
        ):
            next(other)
    wrong: dict[str, Any] = {
        "must be a list of pairs": {"a": 1},
        r"skip_steps\[1\] is 3; it must be a pair": [(1, 2), 3],
        r"skip_steps\[0\] is \(5, 5\); the second step must be larger": [(5, 5)],
        "must be a whole number": [("a", 2)],
    }
    for message, value in wrong.items():
        with pytest.raises(InvalidRequest, match=message):
            loader(skip_steps=value)
