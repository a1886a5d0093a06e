"""The rules of a model's parameters: the rule that cuts each, and this rank's bytes of it.

Also here:

* Tables of text for a terminal.
* A warning where much of a model does not rotate: which modules, and why.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from gyre_trainer.layers.recomputed_layers import RecomputedLayer
from gyre_trainer.rotation.rotated_module import RotatedModule, behaviours_of, own_class
from gyre_trainer.shards.layout import local_of, place_of
from gyre_trainer.torch_internals import parameters_of


def table(lines: Sequence[Sequence[str]], *, num_texts: int) -> str:
    """Aligned columns; the first ``num_texts`` are aligned to the left, all others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < num_texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def mib(num_bytes: int) -> str:
    """The number in MiB."""
    return f"{num_bytes / 2**20:,.{2 if num_bytes >= 2**20 else 4}f}"


def any_number(path: str) -> str:
    """The path with * for each number."""
    return re.sub(r"\b\d+\b", "*", path)


How = Literal["rotated", "replicated", "local"]

_WITHOUT_RULE = {"replicated": "whole on every rank", "local": "buffers, each rank's own"}


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """Parameters of one module that were treated alike; tied ones appear at their first module.

    Attributes:
        path: the module's path in the model; empty for the model itself.
        module_class: the name of its class.
        how: "rotated": cut over the ranks; "replicated": whole on every rank; "local": a buffer, of
            which each rank has its own, as under data parallelism.
        rule: the name of the rule that cuts them; empty where none does.
        names: names of the parameters or buffers, inside the module.
        numel: elements of all of them, whole.
        num_bytes: bytes of all of them, whole.
        num_local_bytes: bytes that this rank has of them.
        num_trainable: elements, whole, of those that take a gradient.
    """

    path: str
    module_class: str
    how: How
    rule: str
    names: tuple[str, ...]
    numel: int
    num_bytes: int
    num_local_bytes: int
    num_trainable: int


@dataclass(frozen=True, slots=True)
class Note:
    """A remark on one module.

    Attributes:
        path: the module's path in the model.
        module_class: the name of its class.
        text: its treatment, and the reason.
        advice: the cost, and a remedy.
    """

    path: str
    module_class: str
    text: str
    advice: str = ""


_REASONS: WeakKeyDictionary[nn.Module, tuple[str, str]] = WeakKeyDictionary()


def note_layer_by_layer(module: nn.Module, reason: str, rule: str) -> None:
    """Let plans tell why a module does not rotate as one, and by which rule it would."""
    _REASONS[module] = reason, rule


@dataclass(frozen=True, slots=True)
class RotationPlan:
    """The rule of every parameter and buffer of a model, in the order of its modules.

    Attributes:
        entries: one or more for each module that has parameters or buffers of its own.
        layer_by_layer: modules with the layers of a block, which rotate one by one.
        notes: layers that backward computes again, and modules with a given rule, too large to be
            verified by default.
    """

    entries: tuple[PlanEntry, ...]
    layer_by_layer: tuple[Note, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def num_local_bytes(self) -> int:
        """Bytes of all parameters and buffers on this rank."""
        return sum(entry.num_local_bytes for entry in self.entries)

    def __str__(self) -> str:
        """A table with a row for entries alike but for numbers in their paths, and the notes."""
        kinds: dict[Any, list[PlanEntry]] = {}
        for each in self.entries:
            rule = each.rule or _WITHOUT_RULE[each.how]
            kind = any_number(each.path), each.module_class, rule, each.num_bytes
            kinds.setdefault(kind, []).append(each)
        rows = [("module", "class", "rule", "MiB", "on a rank")]
        for (path, module_class, rule, _), alike in kinds.items():
            name = f"{path} x{len(alike)}" if len(alike) > 1 else alike[0].path or "(model)"
            rows.append((name, module_class, rule, *_sizes(alike)))
        rows.append(("total", "", "", *_sizes(self.entries)))
        return "\n".join([table(rows, num_texts=3), *lines_of((*self.notes, *self.layer_by_layer))])


def lines_of(notes: Iterable[Note]) -> Iterator[str]:
    """A line for all modules of a class with the same note."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for each in notes:
        kind = each.module_class, each.text, each.advice
        alike.setdefault(kind, []).append(each.path or "(model)")
    for (name, text, advice), (first, *others) in alike.items():
        more = f" and {len(others)} more" if others else ""
        yield f"{name}: {text}: {first}{more}{advice}"


def _sizes(entries: Sequence[PlanEntry]) -> tuple[str, str]:
    return (
        mib(sum(entry.num_bytes for entry in entries)),
        mib(sum(entry.num_local_bytes for entry in entries)),
    )


def plan_of(model: nn.Module) -> RotationPlan:
    """The plan of a model that `rotate_all` or `rotate` has rotated; `print` shows it as a table.

    Example:
        plan = plan_of(model)
        print(plan)
        print(f"{plan.num_local_bytes:,} bytes of parameters and buffers on this rank")
    """
    seen: set[int] = set()
    entries: list[PlanEntry] = []
    by_layer, notes = [], []
    for path, module in model.named_modules():
        entries += _entries(path, module, seen)
        note = partial(Note, path, own_class(module).__name__)
        if any(issubclass(each, RecomputedLayer) for each in behaviours_of(module)):
            notes.append(note("computed again in backward around the modules that rotate"))
        if isinstance(module, RotatedModule):
            if module.is_unverified:
                notes.append(
                    note("too large to be verified at its first calls, which verify=True does")
                )
        elif module in _REASONS:
            by_layer.append(note(*_told_of_layers(module)))
    return RotationPlan(tuple(entries), tuple(by_layer), tuple(notes))


def _told_of_layers(module: nn.Module) -> tuple[str, str]:
    """Why a module rotates layer by layer, and at which cost."""
    reason, rule = _REASONS[module]
    rotating = (each for each in module.modules() if isinstance(each, RotatedModule))
    firsts = [cut for each in rotating for cut in each.rotation.layout.cuts[:1]]
    num_features = sum(cut.shape[cut.dim] for cut in firsts)
    cost = f"; each rank keeps all {num_features:,} activations of a token"
    typed = f"rules={{{own_class(module).__name__}: {rule}}}"
    return (
        f"rotates layer by layer, because {reason}",
        f"{cost}; a rule for it: {typed}" if rule else cost,
    )


def _entries(path: str, module: nn.Module, seen: set[int]) -> Iterator[PlanEntry]:
    """The entries of a module, without tensors that were seen before.

    First what its rotation cuts, then its own parameters and buffers.
    """
    groups: list[tuple[Mapping[str, Tensor], How, str]] = []
    if isinstance(module, RotatedModule):
        rotation = module.rotation
        cut = {cut.name: module.get_parameter(cut.name) for cut in rotation.layout.cuts}
        groups.append((cut, "rotated", type(rotation.rule).__name__))
    own = {name: p for name, p in parameters_of(module).items() if p is not None}
    read = {
        name: p for name, p in own.items() if isinstance(p, DTensor) and place_of(p) is not None
    }
    groups.append((read, "rotated", "ReadRule"))
    groups.append(({name: p for name, p in own.items() if name not in read}, "replicated", ""))
    groups.append((dict(module.named_buffers(recurse=False)), "local", ""))
    for tensors, how, rule in groups:
        new = {name: tensor for name, tensor in tensors.items() if id(tensor) not in seen}
        seen.update(map(id, new.values()))
        if new:
            yield PlanEntry(
                path,
                own_class(module).__name__,
                how,
                rule,
                tuple(new),
                numel=sum(each.numel() for each in new.values()),
                num_bytes=sum(each.numel() * each.element_size() for each in new.values()),
                num_local_bytes=sum(
                    local_of(each).numel() * each.element_size() for each in new.values()
                ),
                num_trainable=sum(each.numel() for each in new.values() if each.requires_grad),
            )


# Below this share most of what rotation saves is lost. Fewer elements than these, 4 MiB in float32,
# are not worth a line.
_ENOUGH = 0.9
_MIN_NUMEL = 2**20
_MAX_NAMED = 4


def warn_of_whole_parameters(
    model: nn.Module,
    plan: RotationPlan,
    kept: Mapping[str, str],
    is_of_known_class: Callable[[nn.Module], bool],
) -> None:
    """Warn if less than nine tenths of the parameters rotate, and name the largest of the others.

    Args:
        model: the model.
        plan: its plan.
        kept: by paths of modules that stay whole on purpose, why they do.
        is_of_known_class: whether a module is of a class that rotates by default.
    """
    whole = [entry for entry in plan.entries if entry.how == "replicated"]
    numel = sum(entry.numel for entry in whole)
    total = numel + sum(entry.numel for entry in plan.entries if entry.how == "rotated")
    if numel < _MIN_NUMEL or numel <= (1 - _ENOUGH) * total:
        return
    by_reason: Counter[str] = Counter()
    example: dict[str, PlanEntry] = {}
    for entry in whole:
        module = model.get_submodule(entry.path)
        reason = _reason(module, entry, kept, is_known=is_of_known_class(module))
        by_reason[reason] += entry.numel
        example.setdefault(reason, entry)
    lines = [
        f"{count:,} as in {example[reason].path or 'the model'}: {reason}"
        for reason, count in by_reason.most_common(_MAX_NAMED)
    ]
    warnings.warn(
        f"only {1 - numel / total:.0%} of the parameters rotate; whole on every rank are "
        f"{'; '.join(lines)}. Give their modules rules, or see docs/rotate.md",
        stacklevel=3,
    )


def _reason(module: nn.Module, entry: PlanEntry, kept: Mapping[str, str], *, is_known: bool) -> str:
    for path, reason in kept.items():
        if f"{entry.path}.".startswith(f"{path}."):
            return reason
    if is_parametrized(module):
        return f"the weights of {entry.module_class} are computed from others"
    if is_known:
        return f"{entry.module_class} has its own forward"
    return f"no rule is known for {entry.module_class}"
