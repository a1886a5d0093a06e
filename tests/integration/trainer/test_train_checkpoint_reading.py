"""A checkpoint's files run no code; what torch itself writes is read as torch reads it."""

import collections
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.errors import CheckpointRejected
from gyre_trainer.training.run_checkpoints import SafePlanner, SafeReader, damage
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from tests.special_files import SPECIAL_FILES

PLAIN = {"epoch": 3, "betas": [0.9, (1, "x")], "nothing": None}


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


class Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    if kind == "bfloat16":
        model = model.to(torch.bfloat16)
    if kind == "FSDP2":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(kind: str, *, flat: bool) -> dict[str, Any]:
    model, optimizer = get_state_dict(
        *trained(kind), options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    return {"model": model, "optimizer": optimizer, **PLAIN}


def leaves(state: Any) -> list[Any]:
    found = torch.utils._pytree.tree_leaves(state)
    return [leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf for leaf in found]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("kind", ["plain", "FSDP2", "bfloat16"])
def test_checkpoints_that_torch_writes_are_read(tmp_path: Path, kind: str, flat: bool) -> None:
    saved, restored = state_of(kind, flat=flat), state_of(kind, flat=flat)
    save(saved, storage_writer=FileSystemWriter(tmp_path, single_file_per_rank=flat))
    load(restored, storage_reader=SafeReader(tmp_path), planner=SafePlanner())
    for one, other in zip(leaves(saved), leaves(restored), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def refused(path: Path) -> str:
    with pytest.raises((CheckpointRejected, CheckpointException)) as caught:
        load(
            {"weight": torch.zeros(2), "value": 0},
            storage_reader=SafeReader(path),
            planner=SafePlanner(),
        )
    return str(caught.value)


def test_a_pickle_in_the_metadata_runs_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    for stranger in (Runs(victim), {"a": [Runs(victim)]}, Metadata({"x": Runs(victim)})):  # type: ignore[dict-item]
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            (tmp_path / ".metadata").write_bytes(pickle.dumps(stranger, protocol))
            assert "names pathlib.Path.touch" in refused(tmp_path) or "getattr" in refused(tmp_path)
            assert not victim.exists()


def test_a_pickle_changes_no_class(tmp_path: Path) -> None:
    name = b"torch.distributed.checkpoint.metadata\nMetadata\n"
    changes = b"\x80\x02c" + name + b"}X\x07\x00\x00\x00versionX\x01\x00\x00\x00xsb."
    (tmp_path / ".metadata").write_bytes(changes)
    assert "changes a class" in refused(tmp_path)
    assert Metadata({}).version is None


def test_a_pickle_among_the_values_runs_nothing(tmp_path: Path) -> None:
    save({"weight": torch.ones(2), "value": Runs(tmp_path / "victim")}, checkpoint_id=tmp_path)
    assert "value is damaged, or something else than numbers" in refused(tmp_path)
    assert not (tmp_path / "victim").exists()


def test_metadata_that_is_none(tmp_path: Path) -> None:
    save({"weight": torch.ones(2), "value": 1}, checkpoint_id=tmp_path)
    whole = (tmp_path / ".metadata").read_bytes()
    elsewhere = pickle.loads(whole)
    for place in elsewhere.storage_data.values():
        place.relative_path = "../shard"
    strange = pickle.loads(whole)
    strange.storage_data[MetadataIndex("weight")] = collections.OrderedDict()
    negative = pickle.loads(whole)
    negative.state_dict_metadata["weight"].chunks[0].sizes = torch.Size([-1])
    others: list[Any] = [{}, 3, elsewhere, strange, negative]
    pickles = [pickle.dumps(each) for each in others]
    for content in (b"", b"\x80", whole[:-1], whole[: len(whole) // 2], b"garbage", *pickles):
        (tmp_path / ".metadata").write_bytes(content)
        assert ".metadata is no metadata of a checkpoint" in refused(tmp_path)
    (tmp_path / ".metadata").unlink()
    assert ".metadata cannot be read: No such file" in refused(tmp_path)


def test_every_bit_flip_in_the_metadata_is_refused_or_harmless(tmp_path: Path) -> None:
    """The unpickler ends in a refusal, or in metadata of the right types, and runs nothing."""
    save({"weight": torch.ones(2)}, checkpoint_id=tmp_path)
    whole = (tmp_path / ".metadata").read_bytes()
    for place in range(0, len(whole), 3):
        (tmp_path / ".metadata").write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        try:
            assert type(SafeReader(tmp_path).read_metadata()) is Metadata
        except CheckpointRejected:
            continue


@pytest.mark.parametrize("kind", SPECIAL_FILES)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_nothing_but_regular_files_is_opened(tmp_path: Path, name: str, kind: str) -> None:
    save(state_of("plain", flat=True), storage_writer=FileSystemWriter(tmp_path))
    (tmp_path / name).unlink()
    SPECIAL_FILES[kind](tmp_path / name)
    with pytest.raises((CheckpointRejected, CheckpointException)) as caught:
        state = state_of("plain", flat=True)
        load(state, storage_reader=SafeReader(tmp_path), planner=SafePlanner())
    told = str(caught.value)
    assert f"{name} cannot be read: " in told
    if kind != "a link to itself":
        assert f"it is {kind}, not a regular file" in told
    assert "cannot be read" in damage(tmp_path, {name: (9, 9)})


def test_a_tensor_file_runs_nothing(tmp_path: Path) -> None:
    save({"weight": torch.ones(2), "value": 1}, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    written = io.BytesIO()
    torch.save(Runs(tmp_path / "victim"), written)
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(written.getvalue())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "__0_0.distcp").write_bytes(written.getvalue())
    assert refused(tmp_path)
    assert not (tmp_path / "victim").exists()
