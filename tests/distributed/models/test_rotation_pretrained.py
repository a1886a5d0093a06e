"""Weights of `transformers` go in and out of rotated models, each rank its own bytes."""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gyre_trainer import pretrained
from gyre_trainer.accounting.counters import Category, Counters
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import CheckpointFailed, CheckpointRejected, RotationError
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import rotate_all
from gyre_trainer.shards.layout import local_of
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole_parameters

MAX_FILE_BYTES = 9000


def made() -> Any:
    """A tiny Llama whose widths no number of ranks divides; its head is the embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, for these tests alone

    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2}
    make: Any = LlamaForCausalLM
    config: Any = LlamaConfig
    return make(config(vocab_size=61, tie_word_embeddings=True, use_cache=False, **heads, **sizes))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it, in several files."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    made().save_pretrained(folder, max_shard_size=MAX_FILE_BYTES)
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def rotated(source: Path) -> tuple[nn.Module, int]:
    """The model with the weights of a folder, and the bytes of tensors that were read for it."""
    with torch.device("meta"):
        model = made()
    mlp = MLPRule(ups=("gate_proj", "up_proj"), down="down_proj")  # also cuts columns
    rotate_all(model, mesh=make_mesh("cpu"), rules={"*.mlp": mlp})
    with counted("preadv") as num_read:
        pretrained.load(model, source)
    return model, sum(num_read)


@contextmanager
def counted(call: str) -> Iterator[list[int]]:
    """A context with the bytes of each call of `os.preadv` or `os.pwritev`."""
    function, num_bytes = getattr(os, call), list[int]()

    def counting(fd: int, buffers: Any, offset: int) -> int:
        num_bytes.append(function(fd, buffers, offset))
        return num_bytes[-1]

    with patch.object(os, call, counting):
        yield num_bytes


def passed_through(source: Path, target: Path) -> tuple[dict[str, Tensor], int, int, int]:
    """Whole parameters; bytes read, written, and of this rank's own shards; saves to ``target``."""
    model, num_read = rotated(source)
    with counted("pwritev") as num_written:
        pretrained.save_pretrained(model, target, max_file_bytes=MAX_FILE_BYTES)
    own = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    return whole_parameters(model), num_read, sum(num_written), own


def test_weights_pass_through_two_and_three_ranks_bit_by_bit(
    ranks: StartRanks, saved: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    expected = dict(AutoModelForCausalLM.from_pretrained(saved).named_parameters())
    by_two, by_three = tmp_path / "two", tmp_path / "three"
    found = ranks(2).run(passed_through, saved, by_two)
    found += ranks(3).run(passed_through, by_two, by_three)
    num_bytes = sum(parameter.nbytes for parameter in expected.values())
    for of_job in (found[:2], found[2:]):
        assert sum(num_written for _, _, num_written, _ in of_job) == num_bytes
    for parameters, num_read, num_written, own in found:
        assert num_read == own >= num_written
        assert own < 0.6 * num_bytes, "no rank holds the model"
        assert parameters.keys() == expected.keys()
        assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    names = sorted(path.name for path in by_two.iterdir())
    assert names == sorted(path.name for path in by_three.iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} <= {*names}
    for name in names:
        assert (by_two / name).read_bytes() == (by_three / name).read_bytes()
    again = AutoModelForCausalLM.from_pretrained(by_three)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, expected[name])


def refused(source: Path) -> tuple[str, str]:
    """What a rank says of a folder whose last file is cut off, and of one that cannot be made."""
    told = []
    with pytest.raises(CheckpointRejected) as rejected:
        rotated(source)
    told.append(str(rejected.value))
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(CheckpointFailed) as failed:
        pretrained.save_pretrained(model.to_empty(device="cpu"), source / "config.json" / "below")
    return told[0], str(failed.value)


def test_every_rank_says_why_weights_are_refused(
    ranks: StartRanks, saved: Path, tmp_path: Path
) -> None:
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    last = max(tmp_path.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1])
    for rejected, failed in ranks(2).run(refused, tmp_path):
        assert rejected.startswith(f"rank 0: {last} is no whole safetensors file: ")
        assert failed.startswith("rank 0: creating the files of the weights failed: ")


WIDTH, HIDDEN, VOCABULARY, NUM_LAYERS = 96, 400, 1000, 3


def wide() -> Any:
    """An untied Llama, in which no tensor is more than a quarter of the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    make: Any = LlamaForCausalLM
    config: Any = LlamaConfig
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": HIDDEN}
    numbers: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": 6}
    return make(config(vocab_size=VOCABULARY, use_cache=False, **sizes, **numbers))


def held(model: nn.Module) -> int:
    """Bytes of this rank's part of all parameters and buffers."""
    tensors = [*map(local_of, model.parameters()), *model.buffers()]
    return sum(each.nbytes for each in tensors)


def peaks(source: Path, target: Path) -> tuple[int, int, list[int]]:
    """The rank's own bytes, the peak of loading, and those of saving, before and after a forward.

    The file has bfloat16 and the model float32, so each part is read into other memory first. It
    is saved as float64 then, for the same reason. Peaks of saving are beside what was there before.
    """
    with torch.device("meta"):
        model = wide()
    rotate_all(model, mesh=make_mesh("cpu"))
    with Counters() as live:
        pretrained.load(model, source)
        loaded = live.peak_bytes
    saved = []
    for _ in range(2):
        with Counters() as live:
            live.label(Category.PARAMETERS, (*model.parameters(), *model.buffers()))
            before = live.live_bytes
            pretrained.save_pretrained(model, target, dtype=torch.float64)
            saved.append(live.peak_bytes - before)
        with torch.no_grad():
            model(torch.arange(12)[None])
    return held(model), loaded, saved


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_rank_holds_more_than_its_shards_and_one_of_them_again(
    ranks: StartRanks, tmp_path: Path, num_ranks: int
) -> None:
    torch.manual_seed(0)
    wide().bfloat16().save_pretrained(tmp_path / "source")
    numel = [prod(each.shape) for each in wide().parameters()]
    assert max(numel) == VOCABULARY * WIDTH
    largest, model = -(-VOCABULARY // num_ranks) * WIDTH + 100, sum(numel)  # of a rank's parts
    found = ranks(num_ranks).run(peaks, tmp_path / "source", tmp_path / "target")
    for own, loaded, saved in found:
        assert own < 4 * model * 1.1 / num_ranks
        assert own < loaded <= own + 2 * largest
        assert 0 < max(saved) <= 8 * largest


def saved_otherwise(source: Path, folder: Path) -> tuple[list[str], dict[str, Tensor]]:
    """What is said of ways that would save this rank's shards alone; the gathered state, saved."""
    model, _ = rotated(source)
    attempts: list[Callable[[], object]] = [
        lambda: torch.save(model.state_dict(), folder / f"{dist.get_rank()}.pt"),
        lambda: pickle.dumps(model.state_dict()),
        lambda: model.save_pretrained(folder / "own"),  # type: ignore[operator]
    ]
    told = []
    for attempt in attempts:
        with pytest.raises(RotationError) as refused:
            attempt()
        told.append(str(refused.value))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
    return told, whole_parameters(model)


def test_no_other_way_saves_the_shards_of_one_rank(
    ranks: StartRanks, saved: Path, tmp_path: Path
) -> None:
    (told, parameters), (told_again, _) = ranks(2).run(saved_otherwise, saved, tmp_path)
    assert told == told_again
    for each in told:
        assert "of this rank alone" in each
        assert "Call gyre_trainer.pretrained.save_pretrained(model, folder) on all ranks" in each
    assert not (tmp_path / "own").exists()
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert all(torch.equal(found[name], each) for name, each in parameters.items())


EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 11},
    "Qwen3Moe": {"num_experts": 11, "moe_intermediate_size": 10, "head_dim": 6},
    "GptOss": {"num_local_experts": 3, "head_dim": 6},
}


def of_experts(family: str) -> Any:
    """A tiny model, whose experts are in one parameter since transformers 5, and not in files."""
    import transformers

    library: Any = transformers
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 20, "vocab_size": 31}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    described = getattr(library, f"{family}Config")(
        **sizes, **heads, **EXPERTS[family], num_hidden_layers=2, num_experts_per_tok=2
    )
    return getattr(library, f"{family}ForCausalLM")(described)


def experts_passed_through(
    source: Path, target: Path, family: str
) -> tuple[dict[str, Tensor], int, int, int]:
    """Whole parameters; bytes read, written, and of this rank's own shards."""
    with torch.device("meta"):
        model = of_experts(family)
    rotate_all(model, mesh=make_mesh("cpu"))
    with counted("preadv") as num_read:
        pretrained.load(model, source)
    with counted("pwritev") as num_written:
        pretrained.save_pretrained(model, target, max_file_bytes=MAX_FILE_BYTES)
    own = sum(local_of(each).nbytes for each in model.parameters())
    return whole_parameters(model), sum(num_read), sum(num_written), own


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_read_and_written_by_parts(
    ranks: StartRanks, tmp_path: Path, family: str, num_ranks: int
) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    plain, source, target = of_experts(family), tmp_path / "source", tmp_path / "target"
    plain.save_pretrained(source, max_shard_size=MAX_FILE_BYTES)
    expected = dict(plain.named_parameters())
    found = ranks(num_ranks).run(experts_passed_through, source, target, family)
    for parameters, num_read, num_written, own in found:
        assert parameters.keys() == expected.keys()
        assert all(torch.equal(parameters[name], expected[name]) for name in expected)
        assert num_written <= num_read == own
    again = AutoModelForCausalLM.from_pretrained(target)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, expected[name])
    stored, written = (
        {
            key: tensor
            for path in folder.glob("*.safetensors")
            for key, tensor in load_file(path).items()
        }
        for folder in (source, target)
    )
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)
