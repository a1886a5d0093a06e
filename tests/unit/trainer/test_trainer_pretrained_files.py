"""Files of weights in a plain model: dtypes, other models' files, damaged ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_trainer import pretrained
from gyre_trainer.errors import CheckpointRejected
from gyre_trainer.rotate import materialize
from gyre_trainer.shards.tensor_files import read_header
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.special_files import SPECIAL_FILES


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("count", torch.tensor(4))


SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 12,
}
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


def test_the_first_name_that_fits_is_replaced_alone(tmp_path: Path) -> None:
    """Here layers change their names in a ring, which one replacement after the other cannot do."""
    values = {"one.weight": torch.ones(1, 1), "two.weight": torch.zeros(1, 1)}
    save_file(values, tmp_path / "model.safetensors")
    model = nn.ModuleDict({each: nn.Linear(1, 1, bias=False) for each in ("one", "two")})
    pretrained.load(model, tmp_path, key_mapping={"^one": "two", "^two": "one"})
    found = model.state_dict()
    assert (float(found["one.weight"]), float(found["two.weight"])) == (0.0, 1.0)


def test_heads_may_differ_where_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of BERT's pretraining: a masked model has less, a classifier something else."""
    import transformers  # seconds, for this alone

    library: Any = transformers
    described = library.BertConfig(**SIZES)
    whole = library.BertForPreTraining(described)
    whole.save_pretrained(tmp_path)
    expected = library.BertForMaskedLM.from_pretrained(tmp_path).state_dict()
    with torch.device("meta"):
        model = library.BertForMaskedLM(described)
    with pytest.raises(CheckpointRejected, match="strict=False"):
        pretrained.load(model, tmp_path)
    found = pretrained.load(model, tmp_path, strict=False)
    assert found.missing_keys == []
    assert "cls.seq_relationship.weight" in found.unexpected_keys
    assert "has bert.pooler.dense.bias, and 3 more, which BertForMaskedLM" in caplog.text
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())

    with torch.device("meta"):
        classifier = library.BertForSequenceClassification(described)
    with pytest.raises(CheckpointRejected, match=r"no classifier.weight, and 1 more.*materialize"):
        pretrained.load(classifier, tmp_path, strict=False)
    materialize(classifier, seed=1)
    before = {name: each.clone() for name, each in classifier.state_dict().items()}
    found = pretrained.load(classifier, tmp_path, strict=False)
    assert found.missing_keys == ["classifier.weight", "classifier.bias"]
    assert "has no classifier.weight, and 1 more: values are kept" in caplog.text
    of_whole = whole.state_dict()
    for name, each in classifier.state_dict().items():
        assert torch.equal(each, before[name] if "classifier" in name else of_whole[name])


def test_files_that_share_nothing_with_the_model_are_refused_all_the_same(tmp_path: Path) -> None:
    save_file({"x.y": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointRejected, match="has no tensor of Small"):
        pretrained.load(Small(), tmp_path, strict=False)


def test_weights_in_float8_are_taken_as_they_are_unless_scales_belong_to_them(
    tmp_path: Path,
) -> None:
    """A quantized folder has codes and, under names that no model has, their scales."""
    codes = WHOLE["layer.weight"].to(torch.float8_e4m3fn)
    save_file(WHOLE | {"layer.weight": codes}, tmp_path / "model.safetensors")
    model = Small()
    pretrained.load(model, tmp_path, strict=False)
    assert torch.equal(model.layer.weight.data, codes.float())
    scales = {"layer.weight_scale_inv": torch.full((1, 1), 0.01)}
    save_file(WHOLE | {"layer.weight": codes} | scales, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointRejected, match=r"layer\.weight in float8 and layer\.weight_scale"
    ):
        pretrained.load(Small(), tmp_path, strict=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
        self.other.weight = self.one.weight


def test_different_values_of_a_tied_parameter_are_refused(tmp_path: Path) -> None:
    values, model = torch.randn(2, 3), Tied()
    save_file({"one.weight": values, "other.weight": values + 0}, tmp_path / "model.safetensors")
    pretrained.load(model, tmp_path)
    assert torch.equal(model.one.weight.data, values)
    save_file({"one.weight": values, "other.weight": values + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointRejected, match=r"one\.weight .*other\.weight differ"):
        pretrained.load(Tied(), tmp_path)


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
        _with_header(b"[" * 100_000),
        _with_header([]),
        _with_header({"a": {"dtype": "F32"}}),
        _with_header({"a": _entry(0, 4, 2)}, 4),
        _with_header({"a": _entry(0, 8, -1, -2)}, 8),
        _with_header({"a": _entry(0, 4, 1), "b": _entry(0, 4, 1)}, 4),
        _with_header({"a": _entry(4, 8, 1)}, 8),
        _with_header({"a": _entry(0, 4, 1)}, 3),
        _with_header({"a": _entry(0, 4, 1)}, 5),
        _with_header({"a": _entry(0, 4, 1) | {"dtype": "F33"}}, 4),
        _with_header({"a": _entry(0, 4, 1) | {"shape": [float("inf")]}}, 4),
        _with_header({"a": _entry(0, 64, 1) | {"shape": [4.9, "4"]}}, 64),
        _with_header({"a": _entry(0, 4, 1) | {"shape": [True]}}, 4),
        _with_header({"a": _entry(0, 4, 1) | {"data_offsets": [0.0, 4.0]}}, 4),
        _with_header({"a": _entry(0, 0, 2**70, 0), "b": _entry(0, 4, 2**200)}, 4),
        _with_header({"a": _entry(0, 0, 2**70, 0)}),
        _with_header({"count": _entry(0, 4, *[1] * 65)}, 4),
        _with_header({"layer.weight": _entry(0, 0, 0, 2**63 - 1, 2**63 - 1)}),
        _with_header({"__metadata__": [], "a": _entry(0, 4, 1)}, 4),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointRejected, match=r"model\.safetensors"):
        pretrained.load(Small(), tmp_path)


def test_tensors_without_elements_may_be_named_in_any_order(tmp_path: Path) -> None:
    header = {"b": _entry(4, 8, 1), "a": _entry(0, 4, 1), "none": _entry(4, 4, 0)}
    (tmp_path / "a.safetensors").write_bytes(_with_header(header, 8))
    assert read_header(tmp_path / "a.safetensors").keys() == header.keys()


@pytest.mark.parametrize("index", ["[]", "{", "[" * 100_000, '{"weight_map": {"a": "../x"}}'])
def test_damaged_indexes_are_refused_by_name(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointRejected, match=r"model\.safetensors\.index\.json"):
        pretrained.load(Small(), tmp_path)


@pytest.mark.parametrize("kind", SPECIAL_FILES)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_nothing_but_regular_files_is_opened(tmp_path: Path, name: str, kind: str) -> None:
    SPECIAL_FILES[kind](tmp_path / name)
    with pytest.raises(CheckpointRejected) as rejected:
        pretrained.load(Small(), tmp_path)
    said = str(rejected.value)
    if kind == "a link to itself":
        assert "neither model.safetensors nor" in said
    else:
        assert f"{name} cannot be read: it is {kind}, not a regular file" in said


def test_weights_in_other_files_must_be_saved_again(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointRejected, match=r"neither model\.safetensors nor .* saved again"):
        pretrained.load(Small(), tmp_path)
