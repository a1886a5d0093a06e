"""Lists of experts of which a rank calls only those that its tokens chose.

Every rank must call the same modules in the same order. So a module with such a list calls the
experts that its tokens did not choose, too, with no tokens: in the order of the list, before the
next chosen expert, and the last ones before another module that rotates, such as shared experts,
or after its forward. Whether such a module follows the experts, a rank without tokens for any of
them cannot see, so the ranks tell each other in the first forward (`call_order`). An empty sum of
their outputs is added to the module's output, so that they take part in backward as well, in the
same order on every rank. So is one of what is called before the experts, such as a router: on a
rank without tokens, nothing else may lead from the loss to it.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.experts.call_order import CallOrder
from gyre_trainer.layers.experts.token_rows import WatchExperts
from gyre_trainer.rotation.backward.weighted_outputs import Weighing, as_weighing
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in, uncompiled
from gyre_trainer.rotation.rotation import Rotation

_LIST_NAME = "experts"


class _Calls:
    """The calls of one list of experts during one forward of the module that has it."""

    def __init__(self, experts: Sequence[nn.Module], owner: str, order: CallOrder) -> None:
        self._experts = [ref(expert) for expert in experts]
        self._order = order
        self._owner = owner
        self._no_tokens: Tensor | None = None  # outside of a forward
        self._next = 0
        self._without_tokens = False  # while the experts that are left are called
        self._outputs: list[Tensor] = []

    @property
    def recomputed(self) -> list[Rotation]:
        """The rotations of the experts, if backward computes all of them again."""
        experts: list[Any] = [expert() for expert in self._experts]
        found = [
            each.rotation
            for each in experts
            if isinstance(each, RotatedModule)
            and each.rotation.policy.recomputes
            and each.rotation.rule.recompute_pays
        ]
        return found if len(found) == len(experts) else []

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Calls":
        """The calls of the copied experts."""
        copied = memo[id(self)] = _Calls([], self._owner, self._order.copy())
        experts = [expert() for expert in self._experts]
        copied._experts = [ref(deepcopy(each, memo)) for each in experts if each is not None]
        return copied

    def begin(self, no_tokens: Tensor) -> None:
        self._no_tokens, self._next, self._without_tokens = no_tokens, 0, False

    def before(self, index: int) -> None:
        """Call the experts between the last one and ``index``, which is called now."""
        if self._no_tokens is None:
            return
        if index < self._next:
            raise RotationError(
                f"{self._owner} calls expert {index} after expert {self._next - 1}; "
                "experts that rotate must be called in the order of their list, each at most once"
            )
        if not self._next and not self._without_tokens:
            self._order.expert_comes()
        self._call_up_to(index)
        self._next = index + 1

    def before_other(self, number: int) -> None:
        """Call the experts that are left before another module, if it follows them."""
        if self._no_tokens is None:
            return
        if self._order.follows(number, after_expert=self._next > 0):
            self._call_up_to(len(self._experts))

    def after_other(self, output: Any) -> None:
        """Note what another module returned, if it was called before the experts."""
        if self._no_tokens is not None and not (self._next or self._without_tokens):
            self._outputs += [each.flatten()[:0] for each in _numbers(output) if each.requires_grad]

    def end(self) -> Tensor | None:
        """Call the experts that are left.

        Returns:
            The empty sum of those that were called so, and of what was called before the experts.
        """
        if not self._next:
            self._order.forward_ends()
        self._call_up_to(len(self._experts))
        sums = [output.sum() for output in self._outputs]
        self.abandon()
        return torch.stack([each.to(sums[0].dtype) for each in sums]).sum() if sums else None

    def abandon(self) -> None:
        self._no_tokens = None
        self._outputs = []

    def _call_up_to(self, index: int) -> None:
        self._without_tokens = True
        for missing in range(self._next, index):
            expert = self._experts[missing]()
            assert expert is not None
            output = expert(self._no_tokens)
            self._outputs += _numbers(output)
            self._next = missing + 1
        self._without_tokens = False


class CallsEveryExpert:
    """Mixed in before the class of a module with a list of experts."""

    _expert_calls: _Calls

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as without rotation."""
        recomputed = self._expert_calls.recomputed
        if not recomputed or not torch.is_grad_enabled():
            return self._with_every_expert(*args, **kwargs)
        now = Weighing(recomputed)
        with as_weighing(now), WatchExperts(now):
            return self._with_every_expert(*args, **kwargs)

    def _with_every_expert(self, *args: Any, **kwargs: Any) -> Any:
        tokens = _numbers((args, kwargs))[0]
        self._expert_calls.begin(tokens.reshape(-1, tokens.shape[-1])[:0].clone())
        try:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
            nothing = self._expert_calls.end()
        finally:
            self._expert_calls.abandon()
        return output if nothing is None else _added(output, nothing)


def call_every_expert(model: nn.Module) -> None:
    """Let all modules with a list of rotated experts call every expert, on every rank.

    A list of experts is a `ModuleList` or a `ModuleDict` named `experts`, of modules of one class.
    """
    for path, module in list(model.named_modules()):
        experts = getattr(module, _LIST_NAME, None)
        if isinstance(experts, nn.ModuleList | nn.ModuleDict) and _are_rotated(experts):
            if isinstance(module, CallsEveryExpert):
                continue
            mix_in(module, CallsEveryExpert, "Whole")
            others = list(_others(module, experts))
            order = CallOrder(_mesh_of(experts), len(others))
            listed = list(experts.children())
            calls = _Calls(listed, path or type(module).__name__, order)
            module._expert_calls = calls  # type: ignore[assignment,unused-ignore]
            for index, expert in enumerate(listed):
                # before the hook that compares the expert, a collective, so that all ranks agree
                expert.register_forward_pre_hook(partial(_before, calls, index), prepend=True)
            for number, other in enumerate(others):
                other.register_forward_pre_hook(partial(_before_other, calls, number), prepend=True)
                other.register_forward_hook(partial(_after_other, calls))


@uncompiled
def _before(calls: _Calls, index: int, _expert: nn.Module, _args: Any) -> None:
    calls.before(index)


@uncompiled
def _before_other(calls: _Calls, number: int, _module: nn.Module, _args: Any) -> None:
    calls.before_other(number)


@uncompiled
def _after_other(calls: _Calls, _module: nn.Module, _args: Any, output: Any) -> None:
    calls.after_other(output)


def _numbers(output: Any) -> list[Tensor]:
    """The tensors of floating-point numbers in an output."""
    leaves = tree_flatten(output)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _mesh_of(experts: nn.Module) -> DeviceMesh:
    rotated = next(each for each in experts.modules() if isinstance(each, RotatedModule))
    parameter = rotated.rotation.sharded.parameters[0]
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh


def _others(module: nn.Module, experts: nn.Module) -> Iterator[nn.Module]:
    """The topmost modules beside the experts that are called and rotate, or have such inside.

    One inside would be too late: what is around it may be computed again in backward.
    """
    for child in module.children():
        if child is experts or not _rotates(child):
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _others(child, experts)
        else:
            yield child


def _rotates(module: nn.Module) -> bool:
    return any(isinstance(each, RotatedModule) for each in module.modules())


def _are_rotated(experts: nn.Module) -> bool:
    listed = list(experts.children())
    is_list = len(listed) > 1 and len({own_class(expert) for expert in listed}) == 1
    return is_list and _rotates(experts)


def _added(output: Any, nothing: Tensor) -> Any:
    """The output, with an exact zero added to its first tensor of floating-point numbers."""
    leaves, spec = tree_flatten(output)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaves[position] = leaf + nothing.to(leaf.dtype)
            break
    return tree_unflatten(leaves, spec)
