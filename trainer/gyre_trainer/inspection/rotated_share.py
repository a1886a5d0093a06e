"""A warning where much of a model does not rotate: which modules, and why."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from gyre_trainer.inspection.rotation_plan import PlanEntry, RotationPlan

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
        return f"{entry.module_class} has a forward of its own"
    return f"no rule is known for {entry.module_class}"
