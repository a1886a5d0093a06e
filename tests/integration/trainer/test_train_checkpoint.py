"""Checkpoints of one rank, through torch.distributed's own one-rank group."""

import json
import resource
import signal
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.errors import CheckpointFailed, CheckpointRejected
from gyre_trainer.frameworks.accelerate import load_states, save_states
from gyre_trainer.training.config import TrainConfig, build
from gyre_trainer.training.gpt import GPT, GPTConfig
from gyre_trainer.training.run_checkpoints import Checkpoints, TrainState, latest

CONFIG = GPTConfig(
    vocab_size=32, num_layers=1, dim=16, num_heads=2, num_kv_heads=2, hidden_dim=32, max_seq_len=8
)


class Position:
    """The part of a loader that checkpoints need."""

    def __init__(self, cursor: bytes) -> None:
        self.cursor = cursor

    def state_dict(self) -> dict[str, bytes]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state_dict: Mapping[str, bytes]) -> None:
        self.cursor = state_dict["cursor"]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(run_of(tmp_path))


def run_of(out: Path, name: str = "adamw") -> TrainConfig:
    data = {"dataset": "none", "batch_size": 1, "sequence_length": 8}
    return build(
        TrainConfig,
        {
            "run": {"out": str(out), "steps": 9},
            "data": data,
            "model": asdict(CONFIG),
            "optimizer": {"name": name},
            "checkpoint": {"keep": 2},
        },
    )


def trained(seed: int, cursor: bytes = b"\x00\xff") -> TrainState:
    """A model after one step, so that its optimizer has moments."""
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(32, (2, 9))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return TrainState(model, [optimizer], Position(cursor))


def tensors(state: TrainState) -> list[torch.Tensor]:
    moments = [value for entry in state.optimizers[0].state.values() for value in entry.values()]
    return [*state.model.parameters(), *moments]


def test_a_checkpoint_restores_every_bit(folder: Path, checkpoints: Checkpoints) -> None:
    saved, restored = trained(1, b"\x00 some place \xff"), trained(2)
    checkpoints.save(saved, 7)
    assert latest(folder) == folder / "step-00000007"
    assert checkpoints.load(restored, latest(folder)) == 7
    assert restored.loader.state_dict() == {"cursor": b"\x00 some place \xff"}
    assert len(tensors(saved)) == 4 * len(list(saved.model.parameters()))
    assert all(
        torch.equal(one, other)
        for one, other in zip(tensors(saved), tensors(restored), strict=True)
    )


def test_an_optimizer_keeps_the_options_that_it_is_given(
    folder: Path, checkpoints: Checkpoints
) -> None:
    checkpoints.save(trained(1), 7)
    restored = trained(2)
    (options,) = restored.optimizers[0].param_groups
    options |= {"weight_decay": 0.5, "betas": (0.8, 0.9), "eps": 1e-3}
    checkpoints.load(restored, latest(folder))
    (options,) = restored.optimizers[0].param_groups
    assert (options["weight_decay"], options["betas"], options["eps"]) == (0.5, (0.8, 0.9), 1e-3)


def test_a_parameter_that_had_no_gradient_yet_has_no_state_after_a_resume(
    tmp_path: Path, folder: Path, checkpoints: Checkpoints
) -> None:
    """Such as those of a tower of images while a run has seen texts alone."""

    def made(seed: int) -> TrainState:
        state = trained(seed)
        tower = torch.nn.Linear(3, 3, bias=False)
        state.model.tower = tower
        state.optimizers[0].add_param_group({"params": [tower.weight]})
        return state

    saved = made(1)
    checkpoints.save(saved, 7)
    save_states(saved.model, saved.optimizers[0], tmp_path / "states")
    for kind in ("ours", "accelerate's"):
        other = made(2)
        optimizer = torch.optim.AdamW(
            [{"params": group["params"]} for group in other.optimizers[0].param_groups]
        )
        restored = TrainState(other.model, [optimizer], other.loader)
        if kind == "ours":
            checkpoints.load(restored, latest(folder))
        else:
            load_states(restored.model, optimizer, tmp_path / "states")
        tower = restored.model.get_parameter("tower.weight")
        assert not optimizer.state.get(tower)
        assert torch.equal(tower, saved.model.get_parameter("tower.weight"))
        assert len(tensors(saved)) == len(tensors(restored))
        for one, again in zip(tensors(saved), tensors(restored), strict=True):
            assert torch.equal(one, again)
        tower.grad = torch.ones_like(tower)
        optimizer.step()
        assert optimizer.state[tower]["step"] == 1


def test_the_newest_checkpoints_stay_and_unfinished_ones_are_deleted(
    folder: Path, checkpoints: Checkpoints
) -> None:
    torn = folder / ".writing-step-00000002"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half of")
    for step in range(1, 5):
        checkpoints.save(trained(step), step)
    assert sorted(path.name for path in folder.iterdir()) == [
        "latest",
        "step-00000003",
        "step-00000004",
    ]


def test_a_run_that_goes_on_from_an_older_checkpoint_has_that_as_its_latest(
    folder: Path, checkpoints: Checkpoints
) -> None:
    for step in (1, 2):
        checkpoints.save(trained(step), step)
    checkpoints.load(trained(9), folder / "step-00000001")
    assert latest(folder).name == "step-00000001"
    checkpoints.save(trained(3), 2)  # written again, with other weights
    assert latest(folder).name == "step-00000002"
    restored = trained(9)
    checkpoints.load(restored, latest(folder))
    assert all(
        torch.equal(one, other)
        for one, other in zip(tensors(trained(3)), tensors(restored), strict=True)
    )


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    folder: Path, checkpoints: Checkpoints
) -> None:
    checkpoints.save(trained(1), 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # the kernel's answer to a write beyond it is an error
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(
            CheckpointFailed, match=r"step-00000002 cannot be written: .*"
        ) as caught:
            checkpoints.save(trained(2), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(caught.value)
    assert latest(folder).name == "step-00000001"
    restored = trained(9)
    assert checkpoints.load(restored, latest(folder)) == 1
    assert all(
        torch.equal(one, other)
        for one, other in zip(tensors(trained(1)), tensors(restored), strict=True)
    )
    checkpoints.save(trained(2), 2)
    assert sorted(path.name for path in folder.iterdir()) == [
        "latest",
        "step-00000001",
        "step-00000002",
    ]


def test_a_torn_checkpoint_is_refused(folder: Path, checkpoints: Checkpoints) -> None:
    checkpoints.save(trained(1), 1)
    (shard,) = latest(folder).glob("*.distcp")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:2000])
    refused(checkpoints, folder, f"{shard.name} has 2000 bytes instead of {len(whole)}")
    shard.unlink()
    refused(checkpoints, folder, f"{shard.name} is missing")
    for place in (10, len(whole) // 2, len(whole) - 10):
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        refused(checkpoints, folder, f"{shard.name} is damaged")
    shard.write_bytes(whole)
    metadata = latest(folder) / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-1] + b"x")
    refused(checkpoints, folder, ".metadata is damaged")


def refused(checkpoints: Checkpoints, folder: Path, words: str) -> None:
    with pytest.raises(CheckpointRejected) as caught:
        checkpoints.load(trained(2), latest(folder))
    assert words in str(caught.value)
    assert "resume from another one" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_names_its_model_and_its_files(folder: Path, checkpoints: Checkpoints) -> None:
    checkpoints.save(trained(1), 1)
    folder = latest(folder)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    assert manifest["model"] == asdict(CONFIG)
    assert (manifest["format"], manifest["step"], manifest["world_size"]) == (2, 1, 1)
    assert manifest["files"] == {
        path.name: [path.stat().st_size, zlib.crc32(path.read_bytes())]
        for path in folder.iterdir()
        if path.name != "checkpoint.json"
    }


def test_states_of_another_optimizer_are_refused_by_name(
    folder: Path, checkpoints: Checkpoints
) -> None:
    checkpoints.save(trained(1), 3)
    other = Checkpoints(run_of(folder.parent, "muon"))
    with pytest.raises(CheckpointRejected, match=r"states of 'adamw'.* says muon"):
        other.load(trained(2), latest(folder))
