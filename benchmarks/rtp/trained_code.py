"""Writes the digests of blocks that train exactly: no digest enters the table by another way.

    python -m benchmarks.rtp.trained_code [--models Llama Mixtral]

Each family trains on two and on three ranks with every block of the table, whatever its code is. A
block whose losses, gradients and parameters are those of one process gets its digest written, under
the version of the library. Digests of other versions stay.
"""

import argparse
import json
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gyre_trainer.layers
import torch
from gyre_trainer.layers import known_blocks
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.experts import ExpertsRule
from gyre_trainer.layers.known_blocks import UnknownCode, digest_of
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.layers.recomputed_layers import RecomputedNorm
from gyre_trainer.rotate import RotationPolicy
from gyre_trainer.rotation.rotated_module import RotatedModule, own_class
from torch import Tensor, nn

from benchmarks.rtp.families import FAMILIES
from benchmarks.rtp.tried import attempts
from benchmarks.rtp.tried.attempts import Subject
from benchmarks.rtp.tried.causal import EXPERTS, GPT
from benchmarks.rtp.tried.family import HEADS, Family, causal, masked, seq2seq
from tests.distributed.gloo_ranks import Ranks

FILE = Path(gyre_trainer.layers.__path__[0]) / "trained_code.json"
# The library takes softmax and norms in float32, even of float64.
TOLERANCE = 2e-5
_NORMS = "Norm", "LayerScale"
_TABLE = AttentionRule, MLPRule, ExpertsRule


class Sequences(nn.Module):
    """The sequences of torch's modules that are MLPs."""

    def __init__(self) -> None:
        super().__init__()
        up, down = partial(nn.Linear, 8, 12), partial(nn.Linear, 12, 8)
        self.layers = nn.ModuleList(
            [
                nn.Sequential(up(), nn.GELU(), down()),
                nn.Sequential(up(), nn.ReLU(), nn.Dropout(0.0), down()),
                nn.Sequential(up(), nn.ReLU(), down(), nn.Dropout(0.0)),
                nn.Sequential(up(), nn.ReLU(), nn.Dropout(0.0), down(), nn.Dropout(0.0)),
                nn.Sequential(nn.LayerNorm(8), up(), nn.GELU(), down()),
                nn.Sequential(nn.LayerNorm(8), up(), nn.GELU(), nn.Dropout(0.0), down()),
                nn.Sequential(
                    nn.LayerNorm(8), up(), nn.GELU(), nn.Dropout(0.0), down(), nn.Dropout(0.0)
                ),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class _OfTorch:
    """`Sequences` as a subject."""

    alike, whole, single = False, (), False

    def made(self, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return Sequences().to(dtype)

    def arguments(self) -> dict[str, Tensor]:
        return {"x": torch.randn(12, 3, 8, generator=torch.Generator().manual_seed(1))}


_HEAD: dict[str, Any] = {"head_dim": 8}
# The default kernel of stacked experts takes no float64, so it trains in float32 below.
_EAGER: dict[str, Any] = {"experts_implementation": "eager"}
_GROUPED: dict[str, Any] = EXPERTS | {"moe_intermediate_size": 12}  # rows of 16 bytes
_PLAIN: dict[str, Subject] = {
    **{
        name: causal(name)
        for name in (
            *("Llama", "Mistral", "Qwen2", "Phi", "Phi3", "GPTNeoX", "Starcoder2", "Granite"),
            *("Cohere", "StableLm", "Persimmon", "Olmo", "Olmo2", "Nemotron"),
        )
    },
    **{name: causal(name, **_HEAD) for name in ("Qwen3", "Gemma", "Gemma2")},
    "Gemma3": causal("Gemma3", "Gemma3TextConfig", **_HEAD),
    "Mixtral": causal("Mixtral", num_local_experts=4, **_EAGER),
    "Qwen3Moe": causal("Qwen3Moe", **EXPERTS, **_HEAD, **_EAGER),
    "Olmoe": causal("Olmoe", **EXPERTS, **_EAGER),
    "GptOss": causal("GptOss", **EXPERTS, **_HEAD, **_EAGER),
    "Mixtral by its kernel": causal("Mixtral", single=True, num_local_experts=4),
    "Qwen3Moe by its kernel": causal("Qwen3Moe", single=True, **_GROUPED, **_HEAD),
    "Olmoe by its kernel": causal("Olmoe", single=True, **_GROUPED),
    "GptOss by its kernel": causal("GptOss", single=True, **_GROUPED, **_HEAD),
    "GPT2": Family("GPT2LMHeadModel", GPT),
    "CodeGen": causal("CodeGen", rotary_dim=4, **GPT),
    "GPTNeo": causal(
        "GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
    "T5": seq2seq("T5", d_model=16, d_kv=4, d_ff=20, decoder_start_token_id=0, **HEADS),
    "UMT5": seq2seq("UMT5", d_model=16, d_kv=4, d_ff=20, decoder_start_token_id=0, **HEADS),
    **{
        name: masked(name)
        for name in ("Bert", "Electra", "Camembert", "XLMRoberta", "RobertaPreLayerNorm", "Ernie")
    },
    "Data2VecText": masked("Data2VecText"),
    "Esm": masked("Esm", position_embedding_type="rotary", mask_token_id=3, token_dropout=False),
}
SUBJECTS: dict[str, Any] = {**_PLAIN, **FAMILIES, "torch": _OfTorch()}


class _All:
    """In the place of the digests: it has all of them but those that are left out."""

    def __init__(self, without: set[str]) -> None:
        self._without = without

    def __contains__(self, digest: str) -> bool:
        return digest not in self._without


def _digests(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The digests of what rotates as one by the table, and of norms, with the class's name."""
    for module in model.modules():
        code: nn.Module | None = None
        is_of_torch = own_class(module).__module__[:6] == "torch."
        if isinstance(module, RotatedModule) and (
            isinstance(module.rotation.rule, _TABLE) or not is_of_torch
        ):
            code = module.rotation.module
        elif isinstance(module, RecomputedNorm) and not is_of_torch:
            code = module
        if code is None or own_class(code).__module__.startswith("gyre_trainer."):
            continue
        name = own_class(code).__name__
        if isinstance(code, RecomputedNorm) and not any(part in name for part in _NORMS):
            continue
        try:
            yield digest_of(code), name
        except UnknownCode:
            continue


def trained(name: str, without: set[str]) -> tuple[float, dict[str, str], str]:
    """How far a family is from one process, and the digests of its blocks; with what was told."""
    subject: Subject = SUBJECTS[name]
    models: list[Any] = []
    rotate = attempts._rotated

    def rotated(*args: Any, **kwargs: Any) -> Any:
        model, plan = rotate(*args, **kwargs)
        models.append(model)
        return model, plan

    warnings.simplefilter("ignore")
    try:
        with (
            patch.object(known_blocks, "trained_digests", lambda: _All(without)),
            patch.object(attempts, "_rotated", rotated),
        ):
            _, distance, where = attempts._exact(subject, RotationPolicy(recompute="block"))
    except Exception:
        found = dict(_digests(models[0])) if models else {}
        return float("inf"), found, traceback.format_exc(limit=-3)
    return distance, dict(_digests(models[0])), where


def _exact_digests(ranks: Ranks, name: str) -> tuple[dict[str, str], set[str], str]:
    """Those of a family's digests with which it trains exactly, all others, and what was off."""
    distance, found, where = _farthest(ranks, name, set())
    if distance <= TOLERANCE:
        return found, set(), ""
    exact: dict[str, str] = {}
    told = f"{distance:.0e} {where}"
    for digest, kind in found.items():
        distance, _, where = _farthest(ranks, name, set(found) - {digest})
        if distance <= TOLERANCE:
            exact[digest] = kind
        else:
            told += f"; {kind}: {distance:.0e} {where}"
    return exact, found.keys() - exact.keys(), told


def _farthest(ranks: Ranks, name: str, without: set[str]) -> tuple[float, dict[str, str], str]:
    outcomes: list[tuple[float, dict[str, str], str]] = ranks.run(trained, name, without)
    return max(outcomes, key=lambda each: (each[0] != each[0], each[0]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the families, and write the digests of those blocks that are exact."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(SUBJECTS), metavar="NAME")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3])
    options = parser.parse_args(arguments)
    import transformers  # noqa: PLC0415  # seconds, for this command alone

    version = f"transformers {transformers.__version__}"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        groups = []
        for number in options.ranks:
            path = Path(folder) / str(number)
            path.mkdir()
            groups.append(Ranks(number, path))
            stack.callback(groups[-1].end)
        for model in options.models:
            exact: dict[str, str] = {}
            wrong: set[str] = set()
            for number, ranks in zip(options.ranks, groups, strict=True):
                found, others, told = _exact_digests(ranks, model)
                exact |= found
                wrong |= others
                print(f"{model} on {number}: {len(found)} exact {told}", flush=True)
            _write(version, {k: exact[k] for k in exact if k not in wrong})


def _write(version: str, exact: dict[str, str]) -> None:
    file = json.loads(FILE.read_text("utf-8"))
    names: dict[str, str] = file.setdefault(version, {})
    for digest, name in exact.items():
        known = {name, *filter(None, names.get(digest, "").split(", "))}
        names[digest] = ", ".join(sorted(known))
    file[version] = dict(sorted(names.items()))
    FILE.write_text(json.dumps(file, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
