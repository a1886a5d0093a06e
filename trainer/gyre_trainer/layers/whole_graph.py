"""A rotated model whose forward is one graph of `torch.compile`.

See [Note: Ring passes in one graph] in `gyre_trainer.rotation.pass_operator`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.dropout import SliceDropout
from gyre_trainer.layers.encoded.quantized_linear import is_quantized
from gyre_trainer.layers.experts.lists import EXPERT_HOOKS, CallsEveryExpert
from gyre_trainer.layers.head.deferred_logits import DefersLogits
from gyre_trainer.layers.linear import AddsBias
from gyre_trainer.layers.multihead import RotatedMultiheadAttention
from gyre_trainer.layers.norm import RecomputedNorm
from gyre_trainer.layers.projections import SliceTransposed
from gyre_trainer.layers.split.block import SplitBlock, SplitCore, SplitLast, entry_of
from gyre_trainer.layers.transformer import RotatedFeedForward
from gyre_trainer.layers.whole.read_operator import number_in_graphs, order_reads, traced_read
from gyre_trainer.layers.whole.read_parameters import READABLE
from gyre_trainer.layers.whole.replicated import ReplicatedModule
from gyre_trainer.rotation.backward.recomputed_part import RecomputedLayer, RecomputedPart
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.graph_sites import NOTHING, Sites
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.pass_operator import traced_pass
from gyre_trainer.rotation.rotated_module import RotatedModule, behaviours_of, mix_in
from gyre_trainer.rotation.rule import parameter_at, swapped
from gyre_trainer.shards.local_shards import local_of

_IN_GRAPHS = {
    RotatedModule,
    RotatedFeedForward,
    RotatedMultiheadAttention,
    AddsBias,
    CallsEveryExpert,
    DefersLogits,
    ReplicatedModule,
    RecomputedNorm,
    RecomputedPart,
    SliceDropout,
    SliceTransposed,
    SplitBlock,
    SplitCore,
    SplitLast,
}
# Of these a graph has the forward of their own class.
_WITH_OWN_FORWARD = (ReplicatedModule, RecomputedNorm, RecomputedPart, CallsEveryExpert)
_FIRST_CALL = "_checks_a_first_call"  # marks hooks


class RotatedInGraph:
    """Mixed in before a rotated module: in a graph of the compiler its ring pass is an operator.

    Attributes:
        sites: what graphs know of the module.
        traced: `traced_pass`, marked for the compiler.
    """

    rotation: Any
    sites: Sites
    number_in_graphs: int
    traced: Callable[..., Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy that graphs tell from the module."""
        sites = self.__dict__.pop("sites")
        try:
            copied: Any = super().__deepcopy__(memo)  # type: ignore[misc]
        finally:
            self.sites = sites
        _number(copied)
        return copied

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as without a compiler."""
        if not torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        output = self.ring_pass(args, kwargs)
        if isinstance(self, AddsBias):
            module: Any = self
            return output + cast(local_of(parameter_at(module, "bias")), output.dtype)
        return output

    def ring_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a ring pass as an operator."""
        module: Any = self
        # by their names there may be whole ones, which the model's forward reads
        replicated = [parameter_at(module, name) for name in self.rotation.replicated]
        parameters = [*self.rotation.sharded.parameters, *replicated]
        args, kwargs = tree_map(_or_nothing, (args, kwargs))
        return self.traced(self.number_in_graphs, parameters, args, kwargs)


class SplitInGraph(RotatedInGraph):
    """The same of a module that rotates in part: its own forward is traced.

    This calls `ring_forward`, in a split block from its core.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as without a compiler."""
        return super(RotatedInGraph, self).forward(*args, **kwargs)  # type: ignore[misc]

    def ring_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output, as without a compiler."""
        if not torch.compiler.is_compiling():
            return super().ring_forward(*args, **kwargs)  # type: ignore[misc]
        return self.ring_pass(args, kwargs)


class MultiheadInGraph(SplitInGraph):
    """The same of torch's attention, whose projections go round the ring."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as without a compiler."""
        module: Any = self
        if torch.compiler.is_compiling():
            return module.attend(*args, **kwargs)
        return super().forward(*args, **kwargs)


def _or_nothing(leaf: Any) -> Any:
    return NOTHING if leaf is None else leaf


def _number(module: Any) -> None:
    module.sites = Sites(module)
    module.number_in_graphs = module.sites.number


class ReplicatedInGraph:
    """Mixed in before a replicated module: its own forward, on the plain tensors of its parameters.

    These stand in the place of the parameters while the model runs.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as without a compiler."""
        if not torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        module: Any = self
        forward = own_class(module).forward  # type: ignore[attr-defined]
        dtype = getattr(self, "outer_dtype", None)
        if dtype is None:
            return forward(module, *args, **kwargs)
        own = {name: cast(p, dtype) for name, p in module.named_parameters(recurse=False)}
        args, kwargs = tree_map_only(Tensor, lambda each: cast(each, dtype), (args, kwargs))
        with swapped(module, own):
            return forward(module, *args, **kwargs)


class _FirstCalls:
    """What is known from the first calls of a model, in training and in evaluation.

    Attributes:
        modes: the values of `training` in which there was one.
        reads: the names of parameters that are cut and that forwards read, with their numbers in
            graphs.
    """

    def __init__(self) -> None:
        self.modes: set[bool] = set()
        self.reads: dict[str, int] = {}

    def done(self, model: Any) -> None:
        """Note that there was a first call in the present mode."""
        self.modes.add(model.training)
        paths = {id(module): path for path, module in model.named_modules()}
        for place in getattr(model, READABLE).read_places():
            name = f"{paths[id(place.owner)]}.{place.last}".removeprefix(".")
            self.reads[name] = number_in_graphs(place.stand_in.gathered)

    def __deepcopy__(self, _memo: dict[int, Any]) -> "_FirstCalls":
        """Those of a copied model: none, where it reads parameters, which have other numbers."""
        copied = _FirstCalls()
        copied.modes = set() if self.reads else set(self.modes)
        return copied


class WholeGraph:
    """Mixed in before a model's class: its forward is a compiled graph.

    The first call in each mode, training and evaluation, runs as without a compiler: the checks of
    rules, which such calls make, have no place in a graph.
    """

    training: bool
    _graph: Callable[..., Any]
    _first_calls: "_FirstCalls"
    _traced_read: Callable[..., Any]

    @property
    def is_graph(self) -> bool:
        """Whether the next forward is the graph: an earlier one in this mode made the checks."""
        return self.training in self._first_calls.modes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, as without a compiler.

        Raises:
            RotationError: the forward cannot be one graph.
        """
        if not self.is_graph:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
            self._first_calls.done(self)
            return output
        try:
            return self._graph(self, args, kwargs)
        except Exception as error:
            compiler = torch._dynamo.exc
            if not isinstance(
                error, compiler.TorchDynamoException | compiler.FailOnRecompileLimitHit
            ):
                raise
            raise RotationError(
                f"{own_class(self).__name__} cannot be called as one graph: "  # type: ignore[arg-type]
                f"{_reason(error)}; {_advice(self, error)}"  # type: ignore[arg-type]
            ) from error


def _reason(error: BaseException) -> str:
    """The message of the error of ours that the compiler met, or the compiler's own."""
    met: BaseException | None = error
    while met is not None and not isinstance(met, RotationError):
        met = met.__cause__ or met.__context__
    return str(met or error).strip()


def _advice(model: nn.Module, error: BaseException) -> str:
    """What to do about an error of the compiler."""
    experts = [path for path, each in model.named_modules() if isinstance(each, CallsEveryExpert)]
    if experts and "data-dependent" in str(error):
        return (
            f"where a forward chooses which experts to call, such as perhaps {experts[0]}, "
            "torch.compile(fullgraph=True) fails without rotation, too; take torch.compile(model) "
            "instead of compile_whole"
        )
    return (
        "call it without what no graph can have, such as a cache (use_cache=False), or take "
        "torch.compile(model) instead of compile_whole"
    )


def _forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    read = {
        name: model._traced_read(number, parameter_at(model, name))
        for name, number in model._first_calls.reads.items()
    }
    with swapped(model, read):
        return super(WholeGraph, model).forward(*args, **kwargs)


def compile_whole(model: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Let ``model``'s forward be one graph of `torch.compile`, with its ring passes as operators.

    What it computes does not change. Small modules leave their bundles and rotate by themselves
    from now on; nothing else that is sent changes. Hooks of the model itself stay outside of the
    graph, and those of modules inside are traced.

    Args:
        model: rotated as a whole by `rotate_all`, on one ring.
        backend: a backend of `torch.compile`.

    Raises:
        RotationError: the model has a module that cannot be part of a graph; the message names it.
            Calls raise it where other code of the model cannot.

    Example:
        rotate_all(model, mesh=mesh)
        compile_whole(model)
    """
    if isinstance(model, WholeGraph):
        raise RotationError(f"{own_class(model).__name__} is compiled as one graph already")
    if not hasattr(model, "grad_averaging"):
        raise RotationError(
            f"{type(model).__name__} is not rotated as a whole; first call rotate_all on it"
        )
    modules = dict(model.named_modules())
    for path, module in modules.items():
        _require_fits(path or type(model).__name__, module, is_root=module is model)
    for module in modules.values():
        if isinstance(module, RotatedModule):
            module.leave_bundle()
    order_reads()
    traced = torch._dynamo.nonstrict_trace(traced_pass)
    for module in modules.values():
        each: Any = module  # the checks tell types of `module` alone
        if isinstance(module, RotatedModule):
            mix_in(each, _in_graph(module), "")
            _number(each)
            each.traced = traced
            _keep_checks_outside(entry_of(each))
        _keep_expert_hooks_outside(module)
        if isinstance(module, _WITH_OWN_FORWARD):
            mix_in(each, ReplicatedInGraph, "")
    mix_in(model, WholeGraph, "")
    whole: Any = model
    whole._graph = torch.compile(  # type: ignore[call-overload]  # these do not know all options
        _forward, fullgraph=True, dynamic=False, isolate_recompiles=True, backend=backend
    )
    whole._first_calls = _FirstCalls()
    whole._traced_read = torch._dynamo.nonstrict_trace(traced_read)


def _in_graph(module: RotatedModule) -> type[RotatedInGraph]:
    """What is mixed in before a rotated module."""
    if isinstance(module, RotatedMultiheadAttention):
        return MultiheadInGraph
    return SplitInGraph if isinstance(module, SplitBlock | RotatedFeedForward) else RotatedInGraph


def _require_fits(path: str, module: nn.Module, *, is_root: bool) -> None:
    """Refuse what a graph cannot have."""
    problem = None
    others = [each for each in behaviours_of(module) if each not in _IN_GRAPHS]
    if hasattr(module, "grad_averaging") and not is_root:
        problem = "was rotated by itself; rotate the model by rotate_all alone"
    elif isinstance(module, RecomputedLayer):
        problem = (
            "is recomputed as a whole layer, which compile_whole does not support; take "
            "RotationPolicy(recompute=True), without recompute_layers"
        )
    elif others:
        problem = (
            f"is a {own_class(module).__name__} that rotation runs by {others[0].__name__}, which "
            "compile_whole does not support"
        )
    elif isinstance(module, RotatedModule):
        problem = _problem_of_rotation(module)
    if problem is not None:
        raise RotationError(f"the model cannot be compiled as one graph: {path} {problem}")


def _problem_of_rotation(module: RotatedModule) -> str | None:
    if module.rotation.sharded.ring.replicas is not None:
        return "rotates on several rings"
    if module.rotation.policy.compiler is not None:
        return "is compiled slice by slice (RotationPolicy(compiler=...))"
    if is_quantized(module):  # type: ignore[arg-type]
        return "has weights of few bits (quantize_frozen)"
    if isinstance(module, RotatedMultiheadAttention) and module.rotation.policy.dropout == "equal":
        return 'draws equal dropout masks (RotationPolicy(dropout="equal"))'
    return None


def mark_first_call_hook(hook: Callable[..., Any]) -> None:
    """Mark a forward pre-hook with keyword arguments that checks a module's first calls."""
    setattr(hook, _FIRST_CALL, True)


def _keep_checks_outside(module: nn.Module) -> None:
    """Let such hooks do nothing in graphs; `traced_pass` refuses modules they have not checked."""
    for key, hook in module._forward_pre_hooks.items():
        if hasattr(hook, _FIRST_CALL):
            module._forward_pre_hooks[key] = _outside_of_graphs(hook)


def _outside_of_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    def outside(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            hook(module, args, kwargs)

    return outside


@dataclass(frozen=True, eq=False)
class _OutsideOfGraphs:
    """A hook that does nothing in graphs."""

    hook: Callable[..., Any]

    def __call__(self, *given: Any) -> Any:
        """What the hook returns."""
        return None if torch.compiler.is_compiling() else self.hook(*given)


def _keep_expert_hooks_outside(module: nn.Module) -> None:
    """Let the hooks that make ranks call all experts of a list do nothing in graphs."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            if isinstance(hook, partial) and hook.func in EXPERT_HOOKS:
                hooks[key] = _OutsideOfGraphs(hook)
