"""torchtitan's checkpoints and meshes, with its batches from Gyre."""

import dataclasses
import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gyre_client import Loader
from gyre_client.errors import CursorRejected, InvalidRequest

from tests.conftest import StartDaemon
from tests.distributed.conftest import StartRanks
from tests.frameworks import framework

with warnings.catch_warnings(action="ignore"):
    framework("torchtitan")
    from gyre_client.integrations.torchtitan import GyreDataLoader
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.distributed import parallel_dims

NUM_SAMPLES, SEQ_LEN, BATCH_SIZE = 50, 8, 8
SAVE_AT, NUM_STEPS = 4, 10  # an epoch ends inside the sixth step
IGNORED = -100

Steps = list[list[list[int]]]  # of each step, the rows of tokens of a rank


@pytest.fixture
def corpus(gyred: StartDaemon, tmp_path: Path) -> str:
    """The address of a daemon that has windows of SEQ_LEN + 1 tokens."""
    tokens = np.arange(NUM_SAMPLES * (SEQ_LEN + 1), dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    table = {"uri": str(tmp_path / "tokens.bin"), "format": "tokens", "dtype": "uint16"}
    return gyred({"datasets": {"corpus": {**table, "sequence_length": SEQ_LEN + 1}}}).address


def config(address: str, **arguments: Any) -> Any:
    return GyreDataLoader.Config(dataset="corpus", loader={"address": address}, **arguments)


def built(config: Any, dp_rank: int, dp_world_size: int, local_batch_size: int) -> Any:
    """As torchtitan's Trainer and Validator build it."""
    return config.build(
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        tokenizer=None,
        seq_len=SEQ_LEN,
        local_batch_size=local_batch_size,
    )


class Step:
    """The trainer's own state in a checkpoint."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def train(
    address: str, folder: str, degrees: tuple[int, int], local_batch_size: int, num_steps: int
) -> tuple[int, Steps]:
    """A rank's part of a run from the newest checkpoint on: its batch rank and its steps."""
    data, tensor = degrees
    parallel_dims.device_type = "cpu"  # it takes a machine without a GPU for one with
    dims = parallel_dims.ParallelDims(1, data, 1, tensor, 1, 1, data * tensor, "partial_dtensor")
    mesh = dims.get_optional_mesh("batch")  # as Trainer does
    degree, rank = (mesh.size(), mesh.get_local_rank()) if mesh else (1, 0)
    loader = built(config(address, global_batch_size=BATCH_SIZE), rank, degree, local_batch_size)
    model, state = torch.nn.Linear(1, 1), Step()
    optimizer = torch.optim.SGD(model.parameters())
    checkpointer = CheckpointManager.Config(enable=True, interval=SAVE_AT, keep_latest_k=0).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizer,
        lr_schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        states={"train_state": state},
        sd_adapter=None,
        base_folder=folder,
    )
    checkpointer.load(step=-1)
    batches, steps = iter(loader), []
    num_parts = BATCH_SIZE // (degree * local_batch_size)
    while state.step < num_steps:
        state.step += 1
        rows = []
        for inputs, labels in (next(batches) for _ in range(num_parts)):
            assert inputs["positions"].tolist() == [[*range(SEQ_LEN)]] * local_batch_size
            rows += torch.cat([inputs["input"], labels[:, -1:]], 1).tolist()
        steps.append(rows)
        checkpointer.save(state.step)
    checkpointer.close()
    return rank, steps


def joined(parts: list[tuple[int, Steps]]) -> Steps:
    """The global batches of a run, of which ranks of one batch rank have the same part."""
    by_rank = dict(parts)
    assert all(steps == by_rank[rank] for rank, steps in parts)
    ranks = [by_rank[rank] for rank in sorted(by_rank)]
    return [list(itertools.chain(*rows)) for rows in zip(*ranks, strict=True)]


@pytest.mark.parametrize("resumed", [(4, 2), (1, 1)], ids=str)
def test_a_run_resumes_with_another_data_parallel_degree(
    resumed: tuple[int, int], corpus: str, ranks: StartRanks, tmp_path: Path
) -> None:
    """It was saved with data 2 x tensor 2; its global batches are those of one process."""
    with Loader("corpus", batch_size=BATCH_SIZE, address=corpus) as loader:
        planned = [next(loader)["tokens"].tolist() for _ in range(NUM_STEPS)]
    folder = str(tmp_path / "run")
    saved = joined(ranks(4).run(train, corpus, folder, (2, 2), 2, SAVE_AT + 2))
    assert saved == planned[: SAVE_AT + 2]
    went_on = ranks(resumed[0] * resumed[1]).run(train, corpus, folder, resumed, 1, NUM_STEPS)
    assert joined(went_on) == planned[SAVE_AT:]


def test_a_validation_passes_over_each_sample_once(corpus: str) -> None:
    """Both ranks have equally many batches, with steps = -1; the last one is filled up."""
    validation = dataclasses.replace(config(corpus), infinite=False)  # as Validator does
    batches = [list(built(validation, rank, 2, 4)) for rank in (0, 1)]
    assert [len(each) for each in batches] == [7, 7]  # 50 samples in steps of 8
    labels = torch.cat([labels for each in batches for _, labels in each])
    counted = labels[labels[:, 0] != IGNORED][:, 0]
    assert sorted(counted.tolist()) == [(SEQ_LEN + 1) * n + 1 for n in range(NUM_SAMPLES)]
    assert (labels == IGNORED).sum() == (56 - NUM_SAMPLES) * SEQ_LEN


def test_what_does_not_fit_is_refused(corpus: str) -> None:
    with pytest.raises(InvalidRequest, match="not whole micro-batches of 3"):
        built(config(corpus, global_batch_size=8), 0, 2, 3)
    loader = built(config(corpus, global_batch_size=8), 0, 1, 4)
    loader.load_state_dict({})  # torchtitan's own word for none
    before = loader.state_dict()
    batches = iter(loader)
    next(batches)
    with pytest.raises(InvalidRequest, match="1 micro-batches of this step were not taken"):
        loader.state_dict()
    next(batches)
    assert loader.state_dict() != before
    with pytest.raises(CursorRejected, match="the global batch size is 8 there and 4 here"):
        built(config(corpus), 0, 1, 4).load_state_dict(before)
    longer = config(corpus).build(
        dp_rank=0, dp_world_size=1, tokenizer=None, seq_len=9, local_batch_size=4
    )
    with pytest.raises(InvalidRequest, match="tokens: rows of 10 ids are needed"):
        next(iter(longer))
