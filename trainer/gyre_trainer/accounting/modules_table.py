"""What becomes of each module of a model, as a table."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gyre_trainer.accounting.baselines import add_fake_adapters
from gyre_trainer.accounting.dry_run import on_fake_ranks
from gyre_trainer.inspection.table import table
from gyre_trainer.rotate import plan_of
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.shards.initial.sharded_init import allocate
from gyre_trainer.training.build import add_adapters, encode_frozen, encodes, rotated
from gyre_trainer.training.config import TrainConfig

_NUMBER = r"\b\d+\b"
_Kind = tuple[str, str, int]
"""The path with its numbers replaced, the rule, the bytes of one module."""


@dataclass(frozen=True)
class ModuleCounts:
    """The modules of a model.

    Attributes:
        kinds: by kinds of modules: the path of the first one; number, bytes and rank 0's bytes of
            all.
        notes: a line for each class with the layers of a block that rotates layer by layer.
        thinnest: rows or columns of the matrix with the shortest cut dim, and its name.
    """

    kinds: Mapping[_Kind, tuple[str, npt.NDArray[np.int64]]]
    notes: tuple[str, ...]
    thinnest: tuple[int, str] = (0, "")


def module_counts(config: TrainConfig, num_ranks: int) -> ModuleCounts:
    """The modules of the configured model by kinds. Tied parameters are at their first module.

    Raises:
        ConfigError: there is no such model.
        RotationError: the model cannot be cut for ``num_ranks``.
    """
    with on_fake_ranks(num_ranks) as mesh:
        model = rotated(config, mesh)
        if encodes(config.model):
            allocate(model, torch.device("cpu"))
            encode_frozen(model, config, mesh)
            add_fake_adapters(model, config, torch.device("cpu"))
        else:
            add_adapters(model, config)
        plan = plan_of(model)
    counts: dict[_Kind, tuple[str, npt.NDArray[np.int64]]] = {}
    for entry in plan.entries:
        path = re.sub(_NUMBER, "*", entry.path)
        kind = path, entry.rule or entry.how, entry.num_bytes
        _, count = counts.setdefault(kind, (entry.path, np.zeros(3, np.int64)))
        count += 1, entry.num_bytes, entry.num_local_bytes
    return ModuleCounts(counts, tuple(plan.layer_lines(counts=False)), _thinnest(model))


def _thinnest(model: nn.Module) -> tuple[int, str]:
    """The matrix with the fewest rows or columns along its cut, of the modules that rotate."""
    cuts = (
        (cut.shape[cut.dim], f"{re.sub(_NUMBER, '*', path)}.{cut.name}")
        for path, module in model.named_modules()
        if isinstance(module, RotatedModule)
        for cut in module.rotation.layout.cuts
        if len(cut.shape) > 1
    )
    return min(cuts, default=(0, ""))


def modules_table(
    counts: ModuleCounts, fewer: ModuleCounts | None = None, *, num_more_layers: int = 0
) -> str:
    """A table with one row for each kind of module: MiB, and those on rank 0.

    Rank 0 has the largest slices.

    Args:
        counts: of a model.
        fewer: of the model with one layer less.
        num_more_layers: the layers that the table shows beside those of ``counts``.
    """
    lines = [["module", "rule", "bytes", "per rank"]]
    total = np.zeros(3, np.int64)
    for kind, (first, count) in counts.kinds.items():
        path, rule, _ = kind
        of_layer = count - fewer.kinds[kind][1] if fewer else 0
        row = count + num_more_layers * of_layer
        total += row
        number, *sizes = row.tolist()
        lines.append([f"{path} x{number}" if number > 1 else first, rule, *map(mib, sizes)])
    lines.append(["total", "", *map(mib, total[1:].tolist())])
    return "\n".join([table(lines, num_texts=2), *counts.notes])


def mib(num_bytes: int) -> str:
    """The number in MiB, with about four digits."""
    value = num_bytes / 2**20
    num_decimals = next(
        (num for num, least in enumerate((1000, 100, 1)) if value >= least), 4 if num_bytes else 0
    )
    return f"{value:,.{num_decimals}f}"
