"""Weights of `transformers` go in and out of rotated models, each rank its own bytes."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gyre_trainer import pretrained
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import CheckpointFailed, CheckpointRejected
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import rotate_all
from gyre_trainer.training.build import build_model
from gyre_trainer.training.config import DataConfig, RunConfig, TrainConfig
from gyre_trainer.training.models.gpt import GPT, GPTConfig
from gyre_trainer.training.models.library import LibraryConfig
from gyre_trainer.training.models.sampling import SampleConfig, Sampler
from gyre_trainer.training.rank_context import RankContext
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.conftest import StartEither, StartRanks
from tests.distributed.training import whole_parameters

MAX_FILE_BYTES = 9000
CPU = torch.device("cpu")


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
    """A context with the bytes of each call of `os.preadv` or `os.pwrite`."""
    function, num_bytes = getattr(os, call), list[int]()

    def counting(fd: int, buffers: Any, offset: int) -> int:
        num_bytes.append(function(fd, buffers, offset))
        return num_bytes[-1]

    with patch.object(os, call, counting):
        yield num_bytes


def passed_through(source: Path, target: Path) -> tuple[dict[str, Tensor], int, int, int]:
    """Whole parameters; bytes read, written, and of this rank's own shards; saves to ``target``."""
    model, num_read = rotated(source)
    with counted("pwrite") as num_written:
        pretrained.save_pretrained(model, target, max_file_bytes=MAX_FILE_BYTES)
    own = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    return whole_parameters(model), num_read, sum(num_written), own


def test_weights_pass_through_two_and_three_ranks_bit_by_bit(
    ranks_both_ways: StartEither, saved: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    expected = dict(AutoModelForCausalLM.from_pretrained(saved).named_parameters())
    by_two, by_three = tmp_path / "two", tmp_path / "three"
    found = ranks_both_ways(2).run(passed_through, saved, by_two)
    found += ranks_both_ways(3).run(passed_through, by_two, by_three)
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


def texts(model: Any) -> list[list[int]]:
    """Token ids that follow a prompt, with a cache: the likeliest, and sampled ones."""
    found = []
    for sampled in (False, True):
        torch.manual_seed(3)
        tokens = model.eval().generate(
            torch.arange(5)[None],
            max_new_tokens=8,
            do_sample=sampled,
            use_cache=True,
            pad_token_id=0,
        )
        found.append(tokens[0].tolist())
    return found


def generated(source: Path) -> list[list[int]]:
    with torch.device("meta"):
        model = made()
    rotate_all(model, mesh=make_mesh("cpu"))
    pretrained.load(model, source)
    return texts(model)


def test_a_rotated_model_generates_what_the_plain_one_does(
    ranks_both_ways: StartEither, saved: Path
) -> None:
    from transformers import AutoModelForCausalLM

    expected = texts(AutoModelForCausalLM.from_pretrained(saved))
    assert ranks_both_ways(2).run(generated, saved) == [expected, expected]


SAMPLES = SampleConfig(("0 1", "+"), "bytes", max_new_tokens=6)
SMALL = GPTConfig(61, 1, 16, 2, 2, 32, max_seq_len=5)


def continued(source: Path) -> list[list[str]]:
    """What a rank samples of a Llama whose attention rotates as a whole, and of a GPT."""
    told = []
    context = RankContext(dist.get_rank(), dist.get_world_size(), CPU, make_mesh("cpu"))
    for model in (LibraryConfig(pretrained=str(source)), SMALL):
        config = TrainConfig(RunConfig("nowhere", 1), DataConfig("none", 6, 5), model)
        trained = build_model(config, context).eval()
        for temperature in (0.0, 2.0):
            before = torch.get_rng_state()
            sampler = Sampler(replace(SAMPLES, temperature=temperature), model)
            told.append(sampler.texts(trained))
            assert torch.equal(torch.get_rng_state(), before), "training goes on with its own"
        if not isinstance(trained, GPT):
            told.append(beams(trained))
    return told


def beams(model: Any) -> list[str]:
    """The best of several texts, between which the rows of a cache change places."""
    tokens = model.generate(
        torch.tensor([[3, 9], [7, 1]]),
        num_beams=3,
        max_new_tokens=6,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    return [str(text) for text in tokens.tolist()]


def test_samples_of_a_run_are_those_of_the_plain_model_at_every_number_of_ranks(
    ranks_both_ways: StartEither, saved: Path
) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(saved)
    expected = [
        Sampler(replace(SAMPLES, temperature=temperature), LibraryConfig(str(saved))).texts(plain)
        for temperature in (0.0, 2.0)
    ]
    expected.append(beams(plain))
    by_two, again = ranks_both_ways(2).run(continued, saved)
    assert by_two[:3] == expected
    assert all(greedy != drawn for greedy, drawn in pairwise(by_two))
    assert [again, *ranks_both_ways(3).run(continued, saved)] == [by_two] * 4


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
        assert rejected.startswith(f"rank 0: {last} has ")
        assert failed.startswith("rank 0: creating the files of the weights failed: ")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("count", torch.tensor(4))


WHOLE = {"layer.weight": torch.randn(2, 3), "layer.bias": torch.randn(2), "count": torch.tensor(7)}


def test_a_plain_model_and_the_reference_agree_in_another_dtype(tmp_path: Path) -> None:
    save_file({f"old.{name}": tensor for name, tensor in WHOLE.items()}, tmp_path / "one")
    model = Small().double()
    pretrained.load(model, tmp_path / "one", key_mapping={r"^old\.": ""})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, WHOLE[name].to(tensor.dtype))
    pretrained.save_pretrained(model, tmp_path, dtype=torch.bfloat16)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        expected = WHOLE[name].bfloat16() if name != "count" else WHOLE[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["model.safetensors", "one"]


BAD: dict[str, tuple[dict[str, Tensor], str]] = {
    "missing": ({"count": WHOLE["count"]}, "has no layer.weight"),
    "unknown": (WHOLE | {"x.y": torch.ones(1)}, "has x.y, which Small does not have"),
    "shape": (WHOLE | {"layer.bias": torch.ones(3)}, "has the shape [3], but [2] in the model"),
    "dtype": (WHOLE | {"count": torch.ones(())}, "is torch.float32, but torch.int64 in the model"),
}


@pytest.mark.parametrize("case", BAD)
def test_files_of_another_model_are_refused_by_name(tmp_path: Path, case: str) -> None:
    tensors, message = BAD[case]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointRejected) as rejected:
        pretrained.load(Small(), tmp_path)
    assert message in str(rejected.value)


def _with_header(header: Any, num_bytes: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def _entry(start: int, stop: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        _with_header(b"[1, 2"),
        _with_header([]),
        _with_header({"a": {"dtype": "F32"}}),
        _with_header({"a": _entry(0, 4, 2)}, 4),
        _with_header({"a": _entry(0, 8, -1, -2)}, 8),
        _with_header({"a": _entry(0, 4, 1), "b": _entry(0, 4, 1)}, 4),
        _with_header({"a": _entry(4, 8, 1)}, 8),
        _with_header({"a": _entry(0, 4, 1)}, 3),
        _with_header({"a": _entry(0, 4, 1)}, 5),
        _with_header({"a": _entry(0, 4, 1) | {"dtype": "F33"}}, 4),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointRejected, match=r"model\.safetensors"):
        pretrained.load(Small(), tmp_path)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": {"a": "../x"}}'])
def test_damaged_indexes_are_refused_by_name(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointRejected, match=r"model\.safetensors\.index\.json"):
        pretrained.load(Small(), tmp_path)
