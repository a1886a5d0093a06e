"""The rules of a model's parameters: the rule that cuts each, and this rank's bytes of it.

Also here:

* Tables of text for a terminal.
* A warning where much of a model does not rotate: which modules, and why.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
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
class LayerByLayer:
    """A module with the layers of a block, which rotate one by one.

    Attributes:
        path: the module's path in the model.
        module_class: the name of its class.
        reason: why it does not rotate as one.
        rule: a rule by which it would, as it is typed; empty if none is known.
        num_features: activations of a token that its layers return.
    """

    path: str
    module_class: str
    reason: str
    rule: str
    num_features: int


_REASONS: WeakKeyDictionary[nn.Module, tuple[str, str]] = WeakKeyDictionary()


def note_layer_by_layer(module: nn.Module, reason: str, rule: str) -> None:
    """Let plans tell why a module does not rotate as one, and by which rule it would."""
    _REASONS[module] = reason, rule


@dataclass(frozen=True, slots=True)
class RotationPlan:
    """The rule of every parameter and buffer of a model, in the order of its modules.

    Attributes:
        entries: one or more for each module that has parameters or buffers of its own.
        recomputed: path and class of each module that backward computes again around what rotates.
        unverified: path and class of each module with a rule that was given or found, and that is
            too large to be verified by default.
        layer_by_layer: modules with the layers of a block, which rotate one by one.
    """

    entries: tuple[PlanEntry, ...]
    recomputed: tuple[tuple[str, str], ...] = ()
    unverified: tuple[tuple[str, str], ...] = ()
    layer_by_layer: tuple[LayerByLayer, ...] = ()

    @property
    def num_local_bytes(self) -> int:
        """Bytes of all parameters and buffers on this rank."""
        return sum(entry.num_local_bytes for entry in self.entries)

    def __str__(self) -> str:
        """A table with one row for each entry, and lines for classes treated otherwise."""
        rows: list[tuple[str, ...]] = [
            ("module", "class", "rule", "parameters", "bytes", "bytes here")
        ]
        for each in self.entries:
            sizes = [f"{n:,}" for n in (each.numel, each.num_bytes, each.num_local_bytes)]
            rule = each.rule or _WITHOUT_RULE[each.how]
            rows.append((each.path or "(model)", each.module_class, rule, *sizes))
        again = "computed again in backward around the modules that rotate"
        large = "too large to be verified at its first calls, which verify=True does"
        return "\n".join(
            [
                table(rows, num_texts=3),
                *_by_class(self.recomputed, again),
                *_by_class(self.unverified, large),
                *self.layer_lines(),
            ]
        )

    def layer_lines(self) -> Iterator[str]:
        """A line for each class that rotates layer by layer: why, at which cost, and what to do."""
        classes: dict[tuple[str, ...], list[LayerByLayer]] = {}
        for each in self.layer_by_layer:
            classes.setdefault((each.module_class, each.reason, each.rule), []).append(each)
        for (name, reason, rule), modules in classes.items():
            more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
            line = (
                f"{name}: rotates layer by layer, because {reason}: "
                f"{modules[0].path or '(model)'}{more}; each rank keeps all "
                f"{modules[0].num_features:,} activations of a token"
            )
            yield line + (f"; a rule for it: rules={{{name}: {rule}}}" if rule else "")


def _by_class(modules: Sequence[tuple[str, str]], what: str) -> Iterator[str]:
    """A line for each class among modules, of which path and class are given."""
    paths: dict[str, list[str]] = {}
    for path, module_class in modules:
        paths.setdefault(module_class, []).append(path or "(model)")
    for module_class, (first, *others) in paths.items():
        more = f" and {len(others)} more" if others else ""
        yield f"{module_class}: {what}: {first}{more}"


def plan_of(model: nn.Module) -> RotationPlan:
    """The plan of a model that `rotate_all` or `rotate` has rotated; `print` shows it as a table.

    Example:
        plan = plan_of(model)
        print(plan)
        print(f"{plan.num_local_bytes:,} bytes of parameters and buffers on this rank")
    """
    seen: set[int] = set()
    return RotationPlan(
        tuple(
            entry
            for path, module in model.named_modules()
            for entry in _entries(path, module, seen)
        ),
        tuple(
            (path, own_class(module).__name__)
            for path, module in model.named_modules()
            if any(issubclass(each, RecomputedLayer) for each in behaviours_of(module))
        ),
        tuple(
            (path, own_class(module).__name__)
            for path, module in model.named_modules()
            if getattr(module, "is_unverified", False)
        ),
        tuple(
            LayerByLayer(path, own_class(module).__name__, *_REASONS[module], _features(module))
            for path, module in model.named_modules()
            if module in _REASONS and not isinstance(module, RotatedModule)
        ),
    )


def _features(module: nn.Module) -> int:
    """The outputs of a token that the layers inside return."""
    rotating = (each for each in module.modules() if isinstance(each, RotatedModule))
    return sum(
        cut.shape[each.rotation.layout.cuts[0].dim]
        for each in rotating
        for cut in each.rotation.layout.cuts[:1]
    )


def _entries(path: str, module: nn.Module, seen: set[int]) -> Iterator[PlanEntry]:
    """The entries of a module: what its rotation cuts, then its own parameters and buffers."""
    if isinstance(module, RotatedModule):
        rotation = module.rotation
        cut = {cut.name: module.get_parameter(cut.name) for cut in rotation.layout.cuts}
        yield from _entry(path, module, cut, "rotated", type(rotation.rule).__name__, seen)
    own = {name: p for name, p in parameters_of(module).items() if p is not None}
    read = {name: p for name, p in own.items() if _is_sharded(p)}
    yield from _entry(path, module, read, "rotated", "ReadRule", seen)
    whole = {name: p for name, p in own.items() if name not in read}
    yield from _entry(path, module, whole, "replicated", "", seen)
    buffers = dict(module.named_buffers(recurse=False))
    yield from _entry(path, module, buffers, "local", "", seen)


def _is_sharded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and place_of(parameter) is not None


def _entry(
    path: str, module: nn.Module, tensors: Mapping[str, Tensor], how: How, rule: str, seen: set[int]
) -> Iterator[PlanEntry]:
    """An entry for those of ``tensors`` that were not seen before, if there are any."""
    new = {name: tensor for name, tensor in tensors.items() if id(tensor) not in seen}
    seen.update(map(id, new.values()))
    if new:
        yield PlanEntry(
            path,
            own_class(module).__name__,
            how,
            rule,
            tuple(new),
            numel=sum(tensor.numel() for tensor in new.values()),
            num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in new.values()),
            num_local_bytes=sum(
                local_of(tensor).numel() * tensor.element_size() for tensor in new.values()
            ),
            num_trainable=sum(tensor.numel() for tensor in new.values() if tensor.requires_grad),
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
        if entry.path == path or entry.path.startswith(f"{path}."):
            return reason
    if is_parametrized(module):
        return f"the weights of {entry.module_class} are computed from others"
    if is_known:
        return f"{entry.module_class} has its own forward"
    return f"no rule is known for {entry.module_class}"
