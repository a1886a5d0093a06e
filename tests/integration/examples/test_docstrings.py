"""The examples in docstrings run: each is executed with the names that it takes for granted."""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gyre_client import Loader, detections, objects, padded, texts
from gyre_client.errors import CorruptSample
from gyre_daemon.transforms.recipes import Field, Transform
from gyre_trainer.training.run_checkpoints import SafePlanner, SafeReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.conftest import StartDaemon
from tests.fenced import ROOT

PACKAGES = (
    "daemon/gyre_daemon",
    "client/gyre_client",
    "trainer/gyre_trainer",
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCK = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}.*\n(?:\n+(?= {4}))?)+", re.MULTILINE)


def examples() -> Iterator[tuple[str, str]]:
    """The indented blocks of docstrings that are statements of Python, and whose they are."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
                for block in _BLOCK.findall(f"{text}\n") if text else ():
                    name = getattr(node, "name", path.stem)
                    with suppress(SyntaxError):
                        ast.parse(code := textwrap.dedent(block))
                        yield name, code


EXAMPLES = dict(examples())


def ragged(name: str, *values: bytes) -> dict[str, torch.Tensor]:
    sizes = [0, *(len(value) for value in values)]
    data = torch.frombuffer(bytearray(b"".join(values)), dtype=torch.uint8)
    return {name: data, f"{name}.offsets": torch.tensor(sizes).cumsum(0)}


class _Model:
    def __call__(self, *_: Any) -> float:
        return 0.0


BATCH = {
    **ragged("tokens", b"one", b"three"),
    **ragged("txt", b"one", b"three"),
    **ragged("json", b'{"label": 1}', b'{"label": 2}'),
    "image": torch.zeros(2, 3, 4, 4),
    "boxes": torch.zeros(2, 3, 4),
    "labels": torch.zeros(2, 3, dtype=torch.int64),
    "num_boxes": torch.tensor([1, 2]),
    "class": torch.tensor([0, 1]),
}


@dataclass(frozen=True)
class _Described:
    categories = {"class": ("heron", "tern")}  # noqa: RUF012


# What examples take for granted, beside the names that they import.
NAMES: dict[str, dict[str, Any]] = {
    "base": {},
    "Transform": {
        "Transform": Transform,
        "Field": Field,
        "dataclass": dataclass,
    },
    "GyreError": {"loader": iter([BATCH]), "CorruptSample": CorruptSample},
    "detections": {"loader": [BATCH], "detections": detections, "model": _Model()},
    "categories": {"loader": _Described(), "batch": BATCH},
    "padded": {"loader": [BATCH], "padded": padded, "pad_id": 0},
    "texts": {"loader": [BATCH], "texts": texts},
    "objects": {"batch": BATCH, "objects": objects},
}
# Tests of their own run these.
SERVED = {"__init__", "Loader"}
TRAINER = {"pretrained", "run_checkpoints"}


def test_every_example_is_run() -> None:
    assert sorted(name for name, _ in examples()) == sorted(NAMES.keys() | SERVED | TRAINER)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_examples_run(name: str) -> None:
    exec(EXAMPLES[name], dict(NAMES[name]))


def test_examples_with_a_daemon_run(gyred: StartDaemon, tmp_path: Path) -> None:
    np.arange(4096, dtype=np.int16).tofile(tmp_path / "a.bin")
    table = {"uri": str(tmp_path), "format": "tokens", "dtype": "int16", "sequence_length": 8}
    address = gyred({"datasets": {"corpus": table}}).address
    names = {"num_epochs": 1, "model": _Model(), "torch": torch, "path": tmp_path / "state.pt"}
    for name in SERVED:
        code = EXAMPLES[name].replace("unix:/run/gyre/gyre.sock", address)
        if "address=" not in code:
            code = code.replace("seed=1", f"seed=1, address={address!r}")
        exec(code, {"Loader": Loader, **names})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_example_of_safe_checkpoints_runs(tmp_path: Path) -> None:
    save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    state = {"weight": torch.zeros(2)}
    names = {"load": load, "SafeReader": SafeReader, "SafePlanner": SafePlanner}
    exec(
        EXAMPLES["run_checkpoints"],
        {"state": state, "path": tmp_path, **names},
    )
    assert state["weight"].tolist() == [1, 1]


PRELUDE = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from gyre_trainer import pretrained
from gyre_trainer.rotate import rotate_all

sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).save_pretrained("model")
dist.init_process_group("gloo", init_method="file://{folder}/store", rank=0, world_size=1)
mesh, path = init_device_mesh("cpu", (1,)), "model"
"""


def test_the_example_of_pretrained_weights_runs(tmp_path: Path) -> None:
    code = PRELUDE.replace("{folder}", str(tmp_path)) + EXAMPLES["pretrained"]
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "example.py"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "result" / "config.json").is_file()
