# ruff: noqa: N806  # names carry shape letters
"""A mixture of experts by groups of experts: experts travel, and each rank keeps its own tokens.

No token is sent, so none is dropped for lack of capacity, and no rank waits for an expert that more
tokens chose. The price is that all experts travel to every rank, chosen or not.

Dims: T tokens, D model, H hidden, E experts, K choices of a token, R rows: one for each choice of
an expert that is here.

[Note: Lists of experts]

A rank calls only the experts of a list that its tokens chose, but every rank must call the same
modules in the same order. So a module with such a list calls the other experts, too, with no
tokens: in the order of the list, before the next chosen expert, and the last ones before another
module that rotates and follows the experts, such as shared experts, or after its forward. An empty
sum of their outputs is added to the module's output, so that they take part in backward as well, in
the same order on every rank. So is one of the outputs of modules before the experts, such as a
router: on a rank without tokens, nothing else may lead from the loss to it.

Which modules follow the experts, a rank without tokens for any of them cannot see. So in the first
forward all ranks tell each other each call: of the first expert, of another module that rotates, or
of nothing more. All do that equally often, because they call the modules before the experts alike.
Once a rank has called an expert, a module that other ranks would call instead follows it.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.comm.ring import Ring
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.linear import changed_counts
from gyre_trainer.layers.mlp import refuse_dropout
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in, own_class
from gyre_trainer.rotation.rule import ModuleSlice, Rule
from gyre_trainer.shards.layout import Cut
from gyre_trainer.torch_internals import is_fake, tree_flatten, tree_unflatten, uncompiled


class CallOrder:
    """Which of some modules follow a list of experts; collective until a rank calls an expert.

    See [Note: Lists of experts].
    """

    def __init__(self, ring: Ring, device: torch.device, num_others: int) -> None:
        """``num_others`` other modules rotate."""
        self._ring, self._device = ring, device
        self._num_others = num_others
        self._is_known = not num_others
        self._following: set[int] = set()

    def copy(self) -> "CallOrder":
        """The order of a copied module, which is not known yet."""
        return CallOrder(self._ring, self._device, self._num_others)

    def expert_comes(self) -> None:
        """The first expert in a forward is called now."""
        self._tell(self._num_others)

    def forward_ends(self) -> None:
        """No expert was called in a forward."""
        self._tell(self._num_others + 1)

    def follows(self, number: int, *, after_expert: bool) -> bool:
        """Whether the module ``number``, which is called now, follows the experts.

        ``after_expert`` is whether this rank has called an expert in this forward.
        """
        if after_expert:
            self._following.add(number)
        else:
            self._tell(number)
        return number in self._following

    def _tell(self, number: int) -> None:
        if self._is_known:
            return
        called = torch.zeros(self._num_others + 2, device=self._device)
        called[number] = 1
        if is_fake(called):
            self._is_known = True
            return
        with self._ring.hang_diagnosis.collective("comparing calls of experts"):
            dist.all_reduce(called, dist.ReduceOp.MAX, group=self._ring.group)
        *others, expert, _ = called.gt(0).tolist()
        if expert:
            self._is_known = True
            self._following |= {place for place, there in enumerate(others) if there}


class Experts(nn.Module):
    """Gated MLPs; each token chooses some, and their weights are stacked along the first dim.

    The forward reads the number of experts from the weights, so it runs with all experts or a
    slice.
    """

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.up = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise each expert in place, as a linear layer is."""
        for weight in self.parameters(recurse=False):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the outputs of each token's experts.

        Args:
            x: (..., D).
            chosen: numbers of experts, (..., K). Numbers outside [0, E) add nothing.
            weights: the weights of the chosen experts, (..., K).
        """
        x_TD, chosen_TK, weights_TK = (each.flatten(0, -2) for each in (x, chosen, weights))
        num_experts = self.down.shape[0]
        if num_experts == 0:
            return torch.zeros_like(x)
        choices = chosen_TK.flatten()
        is_here = (choices >= 0) & (choices < num_experts)
        expert, order = torch.where(is_here, choices, num_experts).sort(stable=True)
        numbers = torch.arange(num_experts + 1, device=x.device, dtype=expert.dtype)
        bounds = torch.searchsorted(expert, numbers)
        starts = bounds.tolist()  # the one wait for the device
        order_R = order[: starts[-1]]
        token_R = order_R // chosen_TK.shape[1]
        rows_RD, stacks = x_TD[token_R], (self.gate, self.up, self.down)
        if _takes_groups(rows_RD, stacks):
            y_RD = grouped_mlps(rows_RD, bounds[1:].int(), *stacks)
        else:
            y_RD = mlps(rows_RD, starts, *stacks)
        weights_R1 = weights_TK.flatten()[order_R].unsqueeze(-1)
        return (
            torch.zeros_like(x_TD)
            .index_add_(0, token_R, (y_RD * weights_R1).type_as(x_TD))
            .view_as(x)
        )


def mlps(rows: Tensor, starts: list[int], gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The outputs of gated MLPs, each for its own rows, (R, D).

    Args:
        rows: in the order of the experts, (R, D).
        starts: the first row of each expert, and R.
        gate: (E, H, D).
        up: (E, H, D).
        down: (E, D, H).
    """
    parts = torch.split(rows, [stop - start for start, stop in pairwise(starts)])
    experts = zip(parts, gate.unbind(), up.unbind(), down.unbind(), strict=True)
    return torch.cat(
        [
            F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
            for part, gate, up, down in experts
        ]
    )


# torch 2.9 has it under a private name alone.
_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ALIGNMENT_BYTES = 16  # of pointers and strides, as torch's grouped products require


def grouped_mlps(rows: Tensor, ends: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same as `mlps`, by one product each for the gates, ups and downs of all experts.

    The gradient of a stack of weights is formed at once, next to the ring's buffer.

    Args:
        rows: as for `mlps`; at least one, which the products' backward asks for.
        ends: the row after the last one of each expert, int32.
        gate: (E, H, D).
        up: (E, H, D).
        down: (E, D, H).
    """
    product = partial(_grouped_mm, offs=ends)
    output: Tensor = product(F.silu(product(rows, gate.mT)) * product(rows, up.mT), down.mT)
    return output


def _takes_groups(rows: Tensor, stacks: Sequence[Tensor]) -> bool:
    """Whether torch's grouped products take such rows and weights on their device."""
    if _grouped_mm is None or rows.device.type != "cuda" or not rows.shape[0]:
        return False
    if {torch.bfloat16} != {rows.dtype, *(stack.dtype for stack in stacks)}:
        return False
    bytes_ = [n for each in stacks for n in (each.data_ptr(), each.shape[-1] * each.itemsize)]
    is_aligned = not any(each % _ALIGNMENT_BYTES for each in bytes_)
    return is_aligned and torch.cuda.get_device_capability(rows.device) >= (8, 0)


class MoE(nn.Module):
    """A router and its experts.

    Each token goes to the experts with its largest softmax scores, weighted by these scores over
    their sum.
    """

    def __init__(self, dim: int, hidden_dim: int, *, num_experts: int, num_chosen: int) -> None:
        super().__init__()
        self.num_chosen = num_chosen
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = Experts(num_experts, dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        """The output, shaped as ``x``: (..., D)."""
        scores = self.router(x).softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
        weights, chosen = scores.topk(self.num_chosen, dim=-1)
        output: Tensor = self.experts(x, chosen, weights / weights.sum(-1, keepdim=True))
        return output


@dataclass(frozen=True)
class ExpertsRule(Rule):
    """For a module that adds up the outputs of the experts that each token chose.

    A slice holds the same range of experts of all ``weights``. The forward must read the number of
    experts from them, or from the attribute ``count``; add nothing for a choice of that very
    number, which stands for experts elsewhere; and be linear in the last of the weights. Where it
    unbinds them with `unbind()`, an expert's gradient is formed in the ring's buffer; where it
    indexes them, the gradients of all the slice's experts exist next to it.

    Attributes:
        weights: names of the parameters, each with the experts along its first dim.
        chosen: the argument with the experts' numbers, by its position or its name.
        scores: the argument with a weight for every expert in its last dim, of which a slice takes
            its own; None where the weights are of the chosen experts.
        last: names of the parameters that the output is linear in; () for the last of ``weights``.
        arguments: names of the forward's arguments in their order, so that ``chosen`` and
            ``scores`` may be names of arguments passed by position; () without that.
        count: the module's attribute with the number of experts, a slice's own while it computes.
        gets_rows: whether the forward is called with the slice's choices alone, as rows of one
            choice each. The ``arguments`` are then those rows, the choices and their weights.
    """

    weights: tuple[str, ...] = ("gate", "up", "down")
    chosen: int | str = 1
    scores: int | str | None = None
    last: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    count: str = ""
    gets_rows: bool = False

    @property
    def linear_in(self) -> tuple[str, ...]:
        """The parameters of the last layer."""
        return self.last or self.weights[-1:]

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """All weights, along the experts."""
        refuse_dropout(module)
        parameters = dict(module.named_parameters())
        missing = [name for name in self.weights if name not in parameters]
        if missing:
            raise RotationError(
                f"{type(module).__name__} has no parameter {missing[0]}, which the rule cuts"
            )
        shapes = {name: tuple(parameters[name].shape) for name in self.weights}
        sizes = {shape[0] if shape else 0 for shape in shapes.values()}
        if len(sizes) > 1:
            raise RotationError(
                f"{type(module).__name__} has different numbers of experts in {shapes}"
            )
        return [Cut(name, shape, 0) for name, shape in shapes.items()]

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the slice's experts for the tokens that chose them."""
        start, stop = current.bounds[self.weights[0]]
        own, named = self.arguments_of(start, stop, args, kwargs)
        counts = {self.count: stop - start} if self.count else {}
        with changed_counts(current.module, counts):
            if self.gets_rows:
                return self._run_rows(current.forward, stop - start, named)
            return current.forward(*own, **named)

    def _run_rows(
        self, forward: Callable[..., Tensor], num_experts: int, named: dict[str, Any]
    ) -> Tensor:
        """The sum of the outputs of the rows that chose a slice's experts.

        A kernel for all choices at once would compute and keep rows for every choice, here or
        elsewhere, with each of N slices. Finding the rows waits for the device once.
        """
        x_TD, chosen_TK, weights_TK = (named[name] for name in self.arguments)
        token_R, place_R = (chosen_TK < num_experts).nonzero(as_tuple=True)
        if not token_R.numel():
            return torch.zeros_like(x_TD)
        choice_R, weight_R = chosen_TK[token_R, place_R], weights_TK[token_R, place_R]
        y_RD = forward(x_TD[token_R], choice_R.unsqueeze(1), weight_R.unsqueeze(1))
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        return (
            torch.zeros_like(x_TD, dtype=wide).index_add_(0, token_R, y_RD.to(wide)).type_as(x_TD)
        )

    def arguments_of(
        self, start: int, stop: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments for the experts of [start, stop), by position and by name.

        Raises:
            RotationError: the module is called without an argument that the rule names.
        """
        if self.arguments:
            args, kwargs = (), dict(zip(self.arguments, args, strict=False)) | kwargs
        arguments: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        for name, argument in (("chosen", self.chosen), ("scores", self.scores)):
            if argument is not None and argument not in arguments:
                raise RotationError(
                    f"ExpertsRule({name}={argument!r}): the module is called without that argument"
                )
        chosen = arguments[self.chosen]
        is_here = (chosen >= start) & (chosen < stop)
        if self.scores is not None:
            arguments[self.scores] = arguments[self.scores].narrow(-1, start, stop - start)
        arguments[self.chosen] = torch.where(is_here, chosen - start, stop - start)
        own = [arguments.pop(position) for position in range(len(args))]
        return own, {str(name): value for name, value in arguments.items()}


_LIST_NAME = "experts"


class _Calls:
    """The calls of one list of experts during one forward of its module."""

    def __init__(self, experts: Sequence[nn.Module], owner: str, order: CallOrder) -> None:
        self._experts = [ref(expert) for expert in experts]
        self._order = order
        self._owner = owner
        self._no_tokens: Tensor | None = None  # outside of a forward
        self._next = 0
        self._without_tokens = False  # while the other experts are called
        self._outputs: list[Tensor] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Calls":
        """The calls of the copied experts."""
        copied = memo[id(self)] = _Calls([], self._owner, self._order.copy())
        experts = [expert() for expert in self._experts]
        copied._experts = [ref(deepcopy(each, memo)) for each in experts if each is not None]
        return copied

    def begin(self, no_tokens: Tensor) -> None:
        self._no_tokens, self._next, self._without_tokens = no_tokens, 0, False

    @uncompiled
    def before(self, index: int, _expert: nn.Module, _args: Any) -> None:
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

    @uncompiled
    def before_other(self, number: int, _module: nn.Module, _args: Any) -> None:
        """Call the remaining experts before another module, if it follows them."""
        if self._no_tokens is None:
            return
        if self._order.follows(number, after_expert=self._next > 0):
            self._call_up_to(len(self._experts))

    @uncompiled
    def after_other(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Note what another module returned, if it was called before the experts."""
        if self._no_tokens is not None and not (self._next or self._without_tokens):
            self._outputs += [each.flatten()[:0] for each in _numbers(output) if each.requires_grad]

    def end(self) -> Tensor | None:
        """Call the remaining experts.

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
        tokens = _numbers((args, kwargs))[0]
        self._expert_calls.begin(tokens.reshape(-1, tokens.shape[-1])[:0].clone())
        try:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
            nothing = self._expert_calls.end()
        finally:
            self._expert_calls.abandon()
        return output if nothing is None else _added_experts(output, nothing)


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
            rotated = (each for each in experts.modules() if isinstance(each, RotatedModule))
            sharded = next(rotated).rotation.sharded
            order = CallOrder(sharded.ring, sharded.flat.device, len(others))
            listed = list(experts.children())
            calls = _Calls(listed, path or type(module).__name__, order)
            module._expert_calls = calls  # type: ignore[assignment,unused-ignore]
            for index, expert in enumerate(listed):
                # before the hook that compares the expert, a collective, so that all ranks agree
                expert.register_forward_pre_hook(partial(calls.before, index), prepend=True)
            for number, other in enumerate(others):
                other.register_forward_pre_hook(partial(calls.before_other, number), prepend=True)
                other.register_forward_hook(partial(calls.after_other))


def _numbers(output: Any) -> list[Tensor]:
    """The tensors of floating-point numbers in an output."""
    leaves = tree_flatten(output)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _others(module: nn.Module, experts: nn.Module) -> Iterator[nn.Module]:
    """The topmost modules next to the experts that are called, and rotate or have such inside.

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


def _added_experts(output: Any, nothing: Tensor) -> Any:
    """The output, with an exact zero added to its first tensor of floating-point numbers."""
    leaves, spec = tree_flatten(output)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaves[position] = leaf + nothing.to(leaf.dtype)
            break
    return tree_unflatten(leaves, spec)
