"""Modules that backward computes again around their layers: parts of a layer, and whole layers.

See [Note: Parts that are computed again] in `kept_outputs`.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from gyre_trainer.comm.spans import path_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.backward.expert_reads import Reads, WatchReads
from gyre_trainer.rotation.backward.kept_outputs import KeptOutputs
from gyre_trainer.rotation.backward.module_attributes import BeforeCall, as_before
from gyre_trainer.rotation.backward.recomputation import recomputation_of
from gyre_trainer.rotation.backward.weighted_sums import Dependence, are_added_up, are_dropped_out
from gyre_trainer.rotation.call import is_constant
from gyre_trainer.rotation.form import Arguments
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import uncompiled


class RecomputedPart:
    """Mixed in before the class of a module that is computed again in backward.

    A call with an object that computing again would change, such as a cache of keys and values,
    keeps its activations.

    Attributes:
        keeps_outputs: whether what its rotated modules return is kept, so that their slices need
            not travel once more.
        has_experts: whether a list of experts is inside, of which each rank calls other ones with
            tokens.
        keeps_experts: whether what these return is kept, by the values of `training` with which
            the module was called.
    """

    keeps_outputs: ClassVar[bool] = True
    has_experts: bool = False
    keeps_experts: Mapping[bool, bool] = MappingProxyType({})

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as without recomputation.

        Raises:
            RotationError: the module writes to a buffer of its own, or to an argument.
        """
        assert isinstance(self, nn.Module)
        forward = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        arguments = Arguments(args, kwargs)
        changing = next((leaf for leaf in arguments.leaves if not is_constant(leaf)), None)
        if changing is not None:
            _warn_of(self, changing)
            return forward(*args, **kwargs)
        return _Call(self, forward, arguments).run()


class RecomputedLayer(RecomputedPart):
    """Mixed in before the class of a layer of which nothing but its input is kept.

    An attention's slices travel forward once more, because the MLP's backward comes first and needs
    what lies between the two. The last module of a layer is not computed again.

    Attributes:
        spared: by the values of `training` with which the layer was called: the number of its last
            call of a rotated module, if what that returned is dropped out; else None.
    """

    keeps_outputs = False
    spared: Mapping[bool, int | None] = MappingProxyType({})


class _Entered(torch.autograd.Function):
    """The same tensor, which no node before it can compute again.

    Else a module inside of a layer would ask the layer before for the input of its last norm, and
    that would compute it too early.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _warn_of(module: nn.Module, argument: object) -> None:
    kind = type(argument).__name__
    warnings.warn(
        f"{own_class(module).__name__} is called with a {kind}, which computing it again in "
        "backward would change, so its activations are kept; call the model without it "
        "(use_cache=False for a cache of keys and values)",
        stacklevel=2,
    )


class _Call:
    """One call of a part: what computes it again holds its inputs, but not its activations."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], arguments: Arguments
    ) -> None:
        self._module = module
        self._forward = forward
        self._arguments = arguments
        # Inputs are here until the first computation begins.
        self._tensors = arguments.take_tensors()
        self._recomputations = [recomputation_of(tensor) for tensor in self._tensors]
        keeps_outputs: bool = module.keeps_outputs  # type: ignore[assignment]
        if not keeps_outputs:
            self._tensors = [
                tensor if again is None else _Entered.apply(tensor)  # type: ignore[no-untyped-call]
                for tensor, again in zip(self._tensors, self._recomputations, strict=True)
            ]
            self._recomputations = [None] * len(self._tensors)
        self._needs_grad = [tensor.requires_grad for tensor in self._tensors]
        # Plain tensors may stand in the place of parameters while the model runs.
        self._parameters = list(_parameters_of(module))
        self._device = _device_of(self._tensors, module)
        experts: Mapping[bool, bool] = module.keeps_experts  # type: ignore[assignment]
        self._keeps_experts = experts.get(module.training)
        self._spared: Mapping[bool, int | None] = getattr(module, "spared", {})
        self._is_settled = keeps_outputs or self._has_experts or module.training in self._spared
        self._kept = KeptOutputs(
            self._device,
            keeps=keeps_outputs,
            keeps_promised=self._keeps_experts is not False and self._spared_now is None,
            spared=self._spared_now,
        )
        self._reads_experts = False
        self._reads: list[Any] = []  # of a layer that is not settled
        self._written: list[Any] = []  # attributes, with the values that the forward found

    @property
    def _has_experts(self) -> bool:
        return bool(self._module.has_experts)

    @property
    def _spared_now(self) -> int | None:
        return self._spared.get(self._module.training)

    def run(self) -> Any:
        """The module's output."""
        tensors = list(self._tensors)
        written = [*tensors, *self._module.buffers()]
        versions = [each._version for each in written]
        before = BeforeCall(self._module)
        output = checkpoint(
            self._compute,
            torch.empty(0, device=self._device),  # tells whose random numbers are drawn
            use_reentrant=False,
            context_fn=self._contexts,
            # which tensor is the last that backward needs depends on a rank's tokens
            early_stop=not self._has_experts,
        )
        self._written = before.changes()
        overwritten = before.overwritten()
        if overwritten is not None or versions != [each._version for each in written]:
            what = f"its attribute {overwritten}" if overwritten else "a buffer of its own"
            raise RotationError(
                f"{path_of(self._module)} ({own_class(self._module).__name__}) writes to an "
                f"argument or to {what}, so backward cannot compute it again; take "
                "RotationPolicy(recompute_parts=False), without recompute_layers"
            )
        others = [
            tensor
            for tensor, again in zip(tensors, self._recomputations, strict=True)
            if again is None
        ]
        returned = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        needs_experts = self._needs_experts(returned, tensors)
        spares = self._spares_last(returned)
        self._kept.keep(returned, others, keeps_promised=needs_experts, spares=spares)
        return output

    def _spares_last(self, returned: Sequence[Tensor]) -> bool:
        """Whether the call to be spared is the last one, of which backward needs a mask alone.

        A mode's first call settles which one that is.
        """
        number, nodes = self._kept.last
        if not self._is_settled:
            reads = Dependence((), after=min((node._sequence_nr() for node in nodes), default=0))
            is_read = any(reads.depends(node, nodes) for node in self._reads)
            found = number if are_dropped_out(returned, nodes) and not is_read else None
            module: Any = self._module
            module.spared = {**module.spared, module.training: found}
        return number == self._spared_now and are_dropped_out(returned, nodes)

    def _needs_experts(self, returned: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
        """Whether backward needs what experts returned; a mode's first call settles it."""
        module: Any = self._module
        nodes = self._kept.promised_nodes
        if not nodes or self._keeps_experts:
            return bool(nodes)
        needs = self._reads_experts or not are_added_up(returned, nodes, inputs)
        if needs and self._keeps_experts is False:
            raise RotationError(
                f"{path_of(module)} ({own_class(module).__name__}) uses what its experts return in "
                "another way than at its first call, so backward cannot compute it again; take "
                "RotationPolicy(recompute_parts=False), without recompute_layers"
            )
        module.keeps_experts = {**module.keeps_experts, module.training: needs}
        return needs

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return self._kept.recording(), self._kept.replaying()

    def _compute(self, _anchor: Tensor) -> Any:
        if self._kept.is_replaying:
            with _in_place(self._parameters), as_before(self._written):
                return self._forward_of(self._inputs_again())
        tensors, self._tensors = self._tensors, []
        if not self._is_settled:
            with Reads() as seen:
                output = self._forward_of(tensors)
            self._reads = seen.nodes
            return output
        if not self._has_experts:
            return self._forward_of(tensors)
        with WatchReads(self._kept.promised_nodes, tensors) as reads:
            output = self._forward_of(tensors)
        self._reads_experts = reads.found
        return output

    def _forward_of(self, tensors: Iterable[Tensor]) -> Any:
        args, kwargs = self._arguments.call(self._arguments.leaves, tensors)
        return self._forward(*args, **kwargs)

    def _inputs_again(self) -> Iterator[Tensor]:
        kept, cache = iter(self._kept.others), dict[Any, Tensor]()
        for again, needs_grad in zip(self._recomputations, self._needs_grad, strict=True):
            if again is not None:
                yield again.stand_in(cache)
            else:
                yield next(kept).detach().requires_grad_(needs_grad)


def _parameters_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for each in module.modules():
        parameters: dict[str, Any] = each._parameters
        for name, parameter in parameters.items():
            yield parameters, name, parameter


@contextmanager
def _in_place(places: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """A context in which modules have these parameters, as they had them in forward."""
    now = [(parameters, name, parameters.get(name)) for parameters, name, _ in places]
    for parameters, name, parameter in places:
        parameters[name] = parameter
    try:
        yield
    finally:
        for parameters, name, parameter in now:
            parameters[name] = parameter


def _device_of(tensors: Sequence[Tensor], module: nn.Module) -> torch.device:
    first = next((each for each in (*tensors, *module.parameters())), None)
    return torch.device("cpu") if first is None else first.device
