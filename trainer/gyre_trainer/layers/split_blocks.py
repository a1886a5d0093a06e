"""What the core of a split block returns: an output that only the block's last layer takes.

Also here:

* A core and its last layer as one: the forward of both, and a module that has both.

Split blocks: the core and the last layer rotate as one, though they are in different modules.

BERT's attention computes its heads in one module, the core. Another module beside it has the last
layer, dropout, and a norm with the residual. The module around both rotates: a slice of its core
computes with its heads, and the slice of the last layer makes of these a part of the sum. The
module's own code runs once, as ever. It calls the core, which goes round the ring and returns an
`Unfinished`, and gives that to the last layer, which takes the sum out of it. Nothing else can use
it, so no path through the module's code can be silently wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from inspect import Signature, signature
from types import MethodType
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.linear import core_of, layer_of
from gyre_trainer.rotation.call import cast as to_dtype
from gyre_trainer.rotation.rotated_module import (
    PartialRotation,
    RotatedModule,
    RotationTarget,
    mix_in,
    num_hooks,
    own_class,
    wrap,
)
from gyre_trainer.rotation.rule import Rule, swapped


class Unfinished:
    """Stands in the place of a core's first tensor, from the core to the block's last layer.

    The slices of a block add up only behind the last layer, so what goes into that layer never
    exists. Whatever else uses this object is refused by name.
    """

    __slots__ = ("_block", "_content", "_records", "_version")

    def __init__(self, content: Tensor, block: object = None) -> None:
        """``content`` is for the last layer of ``block``."""
        self._content = content
        self._block = block
        self._records = torch.is_grad_enabled()
        self._version: int | None = None  # of the content, once it was taken

    def take(self, block: object = None) -> Tensor:
        """The content, for the last layer of the block alone; once more, a copy of it.

        Core and last layer are computed at once, so both have gradients, or none has.
        """
        if block is not self._block:
            _refuse("gives it to the last layer of another block")
        if torch.is_grad_enabled() is not self._records:
            _refuse("calls one of both under no_grad, and the other one with gradients")
        version = -1 if self._content.is_inference() else self._content._version
        if self._version is None:
            self._version = version
            return self._content
        if self._version != version:
            _refuse("writes to what the last layer returned, and then calls that layer once more")
        return self._content.clone()  # either may be written to

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and its tools ask any object for these
            raise AttributeError(name)
        _refuse(f"reads .{name}")

    def __add__(self, _other: object = None) -> NoReturn:
        """Refuse to compute."""
        _refuse("computes with it")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __add__
    __getitem__ = __neg__ = __iter__ = __bool__ = __len__ = __add__

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse all functions of torch."""
        _refuse(f"gives it to {getattr(func, '__name__', func)}")


def _refuse(use: str) -> NoReturn:
    raise RotationError(
        "the input of a block's last layer does not exist, because the block rotates as a whole "
        f"with that layer, which is in another module; but something else {use}, such as a hook "
        "on the module before, or a call of that module alone. Let the layers rotate one by one "
        "(find_blocks=False, and no rule for the module)"
    )


def with_first(output: Any, change: Callable[[Tensor], Any]) -> Any:
    """A core's output with another first tensor.

    Raises:
        RotationError: it is no tensor, nor a tuple or list that begins with one.
    """
    if isinstance(output, Tensor):
        return change(output)
    if type(output) in (tuple, list) and output and isinstance(output[0], Tensor):
        return type(output)((change(output[0]), *output[1:]))
    raise RotationError(
        f"the core of a block returns {type(output).__name__}, but it must return a tensor, or a "
        "tuple or list that begins with one, for the block's last layer. Let its layers rotate one "
        "by one (find_blocks=False, and no rule for the module)."
    )


LAST = "_last_layer"  # its name in the module that has both


class PartOfSplit:
    """The base of what is mixed in before the class of a core, and before that of a last layer.

    Attributes:
        around: the module that rotates, in a tuple, so that it is no module inside of this one.
    """

    around: tuple[Any]


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module's class, as it was before the module was a part of a split block."""
    if isinstance(module, PartOfSplit):
        found: Callable[..., Any] = super(PartOfSplit, module).forward  # type: ignore[misc]
        return found
    return MethodType(type(module).forward, module)


@dataclass(frozen=True, eq=False)
class JoinedForward:
    """The core's forward, and then the last layer's on the first tensor that the core returns.

    Attributes:
        core: the module that computes what the last layer takes.
        last: the last layer.
    """

    core: nn.Module
    last: nn.Module

    @property
    def __signature__(self) -> Signature:
        return signature(own_forward(self.core))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output, in the form of the core's."""
        return with_first(own_forward(self.core)(*args, **kwargs), self._finish)

    def _finish(self, x: Tensor) -> Tensor:
        output: Tensor = own_forward(self.last)(x)
        return output


def joined(core: nn.Module, last: nn.Module) -> nn.Module:
    """A module that computes both, with the core's parameters and attributes, and the last layer.

    It shares parameters and modules with them, and a model does not have it.
    """
    found = copy(core)
    found._modules = {**core._modules, LAST: last}
    vars(found)["forward"] = JoinedForward(found, last)
    return found


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
