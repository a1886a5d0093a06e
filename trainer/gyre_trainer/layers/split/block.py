"""Split blocks: the core and the last layer rotate as one, though they are in different modules.

BERT's attention computes its heads in one module, the core. Another module beside it has the last
layer, dropout, and a norm with the residual. The module around both rotates: a slice of its core
computes with its heads, and the slice of the last layer makes of these a part of the sum. The
module's own code runs once, as ever. It calls the core, which goes round the ring and returns an
`Unfinished`, and gives that to the last layer, which takes the sum out of it. Nothing else can use
it, so no path through the module's code can be silently wrong.
"""

from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.projections import core_of, layer_of
from gyre_trainer.layers.split.joined import JoinedForward, PartOfSplit
from gyre_trainer.layers.split.unfinished import Unfinished, with_first
from gyre_trainer.rotation.call import cast as to_dtype
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in, num_hooks
from gyre_trainer.rotation.rule import Rule, swapped
from gyre_trainer.rotation.wrap import PartialRotation, RotationTarget, wrap


class SplitBlock(RotatedModule):
    """Mixed in before the class of the module around a core and a last layer.

    Attributes:
        core_path: the path of the core inside.
    """

    rotates_whole: ClassVar[bool] = False
    core_path: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for this rank's part of the batch, as without rotation."""
        return super(RotatedModule, self).forward(*args, **kwargs)  # type: ignore[misc]  # that of the module's class


class SplitCore(PartOfSplit):
    """Mixed in before the class of a core."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The core's output, with an `Unfinished` in the place of its first tensor."""
        (block,) = self.around
        output = block.ring_forward(*args, **kwargs)
        return with_first(output, lambda content: Unfinished(content, block))


class SplitLast(PartOfSplit):
    """Mixed in before the class of a last layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The block's output; of any other input what the layer makes of it, with whole weights."""
        (x,) = (*args, *kwargs.values())
        (block,) = self.around
        if isinstance(x, Unfinished):
            return x.take(block)
        module = cast("nn.Module", self)
        dtype = block.rotation.policy.outer_dtype
        whole = {
            name: to_dtype(each.full_tensor(), dtype)
            for name, each in module.named_parameters()
            if isinstance(each, DTensor)
        }
        with swapped(module, whole):
            output: Tensor = super().forward(x)  # type: ignore[misc]
        return output


def rotate_by(module: nn.Module, rule: Rule, target: RotationTarget) -> None:
    """Rotate a module by a rule: as a whole, or the core and the last layer that the rule names.

    Raises:
        RotationError: the module does not fit the rule, or a layer inside has a hook.
    """
    if not rule.core:
        _require_no_hooks(module, rule)
        wrap(module, rule, target)
        return
    (last_path,) = {name.rpartition(".")[0] for name in rule.linear_in}
    core = core_of(module, rule.core)
    if last_path.startswith(f"{rule.core}."):
        raise RotationError(
            f"{type(module).__name__}.{last_path} is inside of the core {rule.core} of the rule, "
            "but it must be outside; without a core, the rule is for that module itself"
        )
    last = layer_of(module, last_path)
    _require_no_hooks(module, rule)
    partial = PartialRotation(JoinedForward(core, last), (rule.core, last_path), SplitBlock)
    wrap(module, rule, target, partial)
    assert isinstance(module, SplitBlock)
    module.core_path = rule.core
    mix_in(core, SplitCore, "Split")
    mix_in(last, SplitLast, "Split")
    core.around = last.around = (module,)  # type: ignore[assignment]


def _require_no_hooks(module: nn.Module, rule: Rule) -> None:
    if num_hooks(module, rule):
        raise RotationError(
            f"{own_class(module).__name__}: a hook is registered on a layer inside, and would be "
            "called for each slice, with a part of what the layer computes. Remove it, register it "
            "on the module itself, or give no rule for the module"
        )


def entry_of(module: RotatedModule) -> nn.Module:
    """The module that is called with the arguments of a rotation's call."""
    path = module.core_path if isinstance(module, SplitBlock) else ""
    found: nn.Module = cast("nn.Module", module).get_submodule(path)
    return found


def block_of(entry: nn.Module) -> RotatedModule:
    """The module that rotates when this one is called: itself, or that around a core."""
    if isinstance(entry, SplitCore):
        block: RotatedModule = entry.around[0]
        return block
    assert isinstance(entry, RotatedModule)
    return entry
