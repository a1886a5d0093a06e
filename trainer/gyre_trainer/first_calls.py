"""The checks of a rule at a module's first calls: what it says of itself, and what it computes."""

from math import prod
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gyre_trainer.errors import TrainError
from gyre_trainer.inspection.rule_checks import check_checkpoints, check_rule
from gyre_trainer.inspection.shared_refusal import refusing_together
from gyre_trainer.inspection.verification import verify_module
from gyre_trainer.layers.split.block import SplitBlock, block_of, entry_of
from gyre_trainer.rotation.backward.replay import outside_of_layers
from gyre_trainer.rotation.rotated_module import RotatedModule, uncompiled
from gyre_trainer.rotation.rule import Rule

# A module of this size is gathered in milliseconds, and holds 16 MiB in float32 meanwhile. Larger
# ones might not fit into the memory that rotation is used for.
_MAX_VERIFIED_NUMEL = 2**22


def check_at_first_calls(module: nn.Module, rule: Rule | None, verify: bool | None) -> None:
    """From now on a module's first call in each mode, training and evaluation, is checked.

    Args:
        module: rotated by a rule; any other is left as it is.
        rule: that of the caller; None for the way of the module's class.
        verify: as `rotate_all` has it.
    """
    # A module of which a part rotates, such as torch's attention, is of a kind with tests.
    if not isinstance(module, RotatedModule) or not _has_one_way(module):
        return
    numel = sum(prod(cut.shape) for cut in module.rotation.layout.cuts)
    is_large = verify is None and rule is not None and numel > _MAX_VERIFIED_NUMEL
    module.is_unverified = is_large
    verifies = rule is not None and not is_large if verify is None else verify
    proves = rule is not None and bool(rule.linear_in)
    if not (verifies or proves):
        return
    module.unchecked_modes = frozenset((True, False))

    @uncompiled
    def first_call(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rotated = block_of(called)
        left = rotated.unchecked_modes  # a copy of the module has its own
        if rotated.training not in left:
            return
        try:
            # A checkpoint around the call counts what is saved; the checks are not made again.
            with outside_of_layers(), saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
                check_checkpoints(rotated.rotation, args, kwargs)
                if proves:
                    with refusing_together(rotated.rotation):
                        check_rule(rotated.rotation, args, kwargs)
                if verifies:
                    verify_module(rotated.rotation, args, kwargs)
        except Exception as error:
            if rule is not None and not isinstance(error, TrainError):
                error.add_note(_told_of_slices(rotated))
            raise
        rotated.unchecked_modes = left - {rotated.training}
        hooks = called._forward_pre_hooks
        if not rotated.unchecked_modes and hooks.get(hook.id) is first_call:
            del hooks[hook.id], called._forward_pre_hooks_with_kwargs[hook.id]

    hook = entry_of(module).register_forward_pre_hook(first_call, with_kwargs=True)


def _has_one_way(module: RotatedModule) -> bool:
    """Whether each of its calls goes round the ring with the arguments of the call."""
    return isinstance(module, SplitBlock) or type(module).forward is RotatedModule.forward


def _told_of_slices(module: RotatedModule) -> str:
    """What to do where the code of a module fails that rotates as a whole."""
    return (
        f"{module.rotation.name} rotates as a whole, by {type(module.rotation.rule).__name__}, so "
        "its code runs with a slice of its parameters. If that is what fails, let the layers "
        "inside rotate one by one: no rule for the module, and find_blocks=False"
    )
