"""Parameters that every rank has whole in a forward: replicated ones, and those gathered on use.

Modules read plain tensors in the places of their DTensors. Replicated parameters stand there for
the time of the model's forward, so that any module inside may read them; those that are gathered
for the time of their reader's. See [Note: All-gather on use] in `gyre_trainer.whole.gathered`.

Also here:

* Methods of a rotated model that run as its forward does, such as `encode`.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.rotated_module import (
    RotatedModule,
    RotationTarget,
    ShardedModule,
    mix_in,
    own_class,
)
from gyre_trainer.rotation.rule import Rule, swapped
from gyre_trainer.shards.layout import Cut, Layout, as_parameter, local_of, place_of
from gyre_trainer.shards.sharded_parameters import (
    ShardedParameters,
    note_replaced,
    shard_parameters,
    sharded_parameters_of,
    successor_of,
)
from gyre_trainer.torch_internals import (
    BatchNorm,
    hooks_of,
    parameters_of,
    storage_number,
    tree_leaves,
    tree_map_only,
    uncompiled,
)
from gyre_trainer.whole.adapters import plain_adapters
from gyre_trainer.whole.averaged_gradients import ReplicatedGradients
from gyre_trainer.whole.gathered import GatheredParameter, saved_by_place

# A parameter of 2^18 elements is 1 MiB in float32. A smaller one would take longer for its hops, in
# forward and in backward, than its memory is worth; of one twice as large, every rank would
# have twice as much that it need not have.
MIN_READ_NUMEL = 2**18


def keeps_dtype(module: nn.Module, parameter: Tensor) -> bool:
    """Whether a module reads its parameter in the dtype that it has, whatever it computes in.

    Torch takes activations of a BatchNorm in another dtype, but not weights in another one than
    statistics.
    """
    return isinstance(module, BatchNorm) or not parameter.is_floating_point()


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; a container, such as a `ParameterList`, cannot."""
    return getattr(own_class(module), "forward", None) is not nn.Module.forward


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The parameters that a module's forward reads: its own, and those of containers inside.

    Yields:
        The name in the module, the module that has it, and its name there.
    """
    for name, parameter in parameters_of(module).items():
        if parameter is not None:
            yield name, module, name
    for path, child in module.named_children():
        if not has_forward(child):
            for name, owner, last in own_parameters(child):
                yield f"{path}.{name}", owner, last


@dataclass(frozen=True)
class ReadRule(Rule):
    """For a module whose forward reads parameters itself, as in `x @ self.weight`.

    Its own, and those of a `ParameterList` or another container inside, are cut. They are gathered
    while its forward runs, and again in backward. See [Note: All-gather on use] in
    `gyre_trainer.whole.gathered`. Modules inside are treated as without the rule.

    Attributes:
        min_numel: parameters with fewer elements stay whole.
        names: parameters of layers inside that the forward reads, too, such as "layer.weight".
    """

    min_numel: int = 0
    names: tuple[str, ...] = ()

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """The parameters, each along the first dim that all slices have a part of.

        Raises:
            RotationError: it has none that can be cut.
        """
        read = [name for name, *_ in own_parameters(module)] + list(self.names)
        found = [
            Cut(name, shape := tuple(parameter.shape), _dim(shape, num_slices))
            for name in read
            if (parameter := module.get_parameter(name)).dim() and self.fits(parameter)
        ]
        if not found or not has_forward(module):
            raise RotationError(
                f"{own_class(module).__name__} has no direct parameter that its forward could "
                "read and that can be cut. Give the rule to the module whose forward reads it."
            )
        return found

    def fits(self, parameter: Tensor) -> bool:
        """Whether a parameter is cut."""
        return (
            parameter.is_floating_point()
            and not isinstance(parameter, DTensor)
            and parameter.numel() >= max(1, self.min_numel)
        )


def _dim(shape: tuple[int, ...], num_slices: int) -> int:
    """The dim to cut: the first one, or the next where only ones come between and it is larger."""
    for dim, size in enumerate(shape):
        if size >= num_slices:
            return dim
        if dim and size > 1:
            break
    return 0


def reads_much(module: nn.Module, min_numel: int) -> bool:
    """Whether a parameter of this very module is worth its hops.

    One that is tied to a module inside, as a head's bias may be, is that module's.
    """
    rule = ReadRule(min_numel)
    if any(type(each).__module__.startswith("torch.nn.utils.") for each in hooks_of(module)):
        return False  # such a hook reads them before the forward: weight_norm, spectral_norm, prune
    owned = [owner.get_parameter(last) for _, owner, last in own_parameters(module)]
    if not has_forward(module) or not any(map(rule.fits, owned)):
        return False
    inside = {
        id(parameter)
        for child in module.modules()
        if child is not module and has_forward(child)
        for parameter in parameters_of(child).values()
    }
    return not any(id(parameter) in inside for parameter in owned if rule.fits(parameter))


def read_layers_of(module: nn.Module) -> list[nn.Module]:
    """Layers whose weights a state-space mixer, such as Mamba's, reads when it takes one token.

    Its convolution along the sequence is then a product with the last inputs, and the kernels for
    CUDA take the weights of the step's projection. Both are small.
    """
    if not isinstance(getattr(module, "A_log", None), nn.Parameter):
        return []
    found = (getattr(module, name, None) for name in ("conv1d", "dt_proj"))
    return [each for each in found if isinstance(each, (nn.Conv1d, nn.Linear))]


def is_read_elsewhere(module: nn.Module) -> bool:
    """Whether a parameter of a layer was cut for the forward of a module around it."""
    return any(each.reader is not module for each in vars(module).get("gathered", {}).values())


class ReplicatedModule(ShardedModule):
    """Mixed in before a module's class: its forward reads plain whole tensors instead of DTensors.

    Attributes:
        outer_dtype: the dtype that these, and the floating-point arguments, are cast to; None for
            no cast. Parameters of a BatchNorm stay in the dtype of its statistics.
        gathered: by their names, the cut parameters that its forward reads.
    """

    outer_dtype: torch.dtype | None = None
    gathered: Mapping[str, GatheredParameter] = MappingProxyType({})

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as without rotation."""
        return self.run_plain(super().forward, args, kwargs)  # type: ignore[misc]

    def run_plain(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the module with plain tensors in the place of parameters.

        Raises:
            RotationError: it writes to a gathered parameter.
        """
        assert isinstance(self, nn.Module)
        if self.outer_dtype is not None:
            to_outer = partial(cast, dtype=self.outer_dtype)
            args, kwargs = tree_map_only(Tensor, to_outer, (args, kwargs))
        own = self._readable()
        if not own:
            return method(*args, **kwargs)
        wholes = {name: own[name] for name in self.gathered if name in own}
        with ExitStack() as stack:
            if wholes and torch.is_grad_enabled():
                read = {
                    storage_number(each): (each, self.gathered[n]) for n, each in wholes.items()
                }
                stack.enter_context(saved_by_place(read))
            stack.enter_context(swapped(self, own))
            output = method(*args, **kwargs)
        for name, whole in wholes.items():
            self.gathered[name].require_unwritten(whole)
        return output

    def _readable(self) -> dict[str, Tensor]:
        """What its forward is to read in the place of its parameters, where they are not that."""
        assert isinstance(self, nn.Module)
        found = {}
        for name, parameter in self._read():
            gathered = self.gathered.get(name)
            if gathered is not None and isinstance(parameter, DTensor):
                found[name] = gathered.read()
            elif isinstance(parameter, DTensor) or self.outer_dtype is not None:
                dtype = None if keeps_dtype(self, parameter) else self.outer_dtype
                found[name] = cast(local_of(parameter), dtype)
        return found

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(self, nn.Module)
        if issubclass(own_class(self), nn.MultiheadAttention):  # it calls no layer inside
            yield from self.named_parameters()
            return
        for name, owner, last in own_parameters(self):
            yield name, parameters_of(owner)[last]
        for name, each in self.gathered.items():
            if each.owner is not self and has_forward(each.owner):
                yield name, parameters_of(each.owner)[each.last]


def shard_own(module: nn.Module, rule: ReadRule, target: RotationTarget) -> None:
    """Cut the parameters that a rule says, and gather them while the module's forward runs.

    Raises:
        RotationError: there is none, or one is on another device than the mesh.
    """
    for cut in rule.cuts(module, target.num_slices):
        path, _, last = cut.name.rpartition(".")
        owner = module.get_submodule(path)
        source = owner.get_parameter(last)
        if source.device.type not in ("meta", target.mesh.device_type):
            raise RotationError(
                f"{cut.name} is on {source.device}, but the mesh is of {target.mesh.device_type}"
            )
        sharded = sharded_parameters_of(source)  # of a parameter that it is tied to
        if sharded is None:
            layout = Layout((cut,), target.num_slices)
            sharded = shard_parameters([source], layout, target.mesh)
        _read(module, cut.name, owner, sharded, target)


def share_cut(model: nn.Module, target: RotationTarget) -> None:
    """Let modules read those of their own parameters that are tied to one that is cut."""
    for module in model.modules():
        if isinstance(module, RotatedModule) or not has_forward(module):
            continue
        for name, owner, last in list(own_parameters(module)):
            parameter = owner.get_parameter(last)
            sharded = sharded_parameters_of(parameter)
            if sharded is not None and not isinstance(parameter, DTensor):
                _read(module, name, owner, sharded, target)


def _read(
    module: nn.Module,
    name: str,
    owner: nn.Module,
    sharded: ShardedParameters,
    target: RotationTarget,
) -> None:
    """Put the sharded parameter into its place, and let the module read it."""
    last = name.rpartition(".")[2]
    source = owner.get_parameter(last)
    parameter = successor_of(source, sharded)
    note_replaced(source, f"{name} of {own_class(module).__name__}")
    setattr(owner, last, parameter)
    dtype = None if keeps_dtype(module, parameter) else target.policy.outer_dtype
    gathered = GatheredParameter(owner, last, module, sharded, target.policy, dtype)
    readers = {module: name, **({owner: last} if has_forward(owner) else {})}
    for each, own_name in readers.items():
        mix_in(each, ReplicatedModule, "Replicated")
        reader: Any = each
        reader.outer_dtype = target.policy.outer_dtype
        reader.gathered = {**reader.gathered, own_name: gathered}


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """A context whose backwards do not average gradients; the next one outside averages their sum.

    For gradient accumulation, as DDP's `no_sync`: put all backwards but the last into it, and step
    after the last. It saves one all-reduce per backward, and those over replicas of the ring.
    Gradients of rotated parameters travel round the ring in every backward all the same: a rank has
    no memory for those of other slices. All ranks must do the same.

    Raises:
        RotationError: the model was not rotated, or holds no module that was.

    Example:
        with no_sync(model):
            for part in parts[:-1]:
                (model(part).mean() / len(parts)).backward()
        (model(parts[-1]).mean() / len(parts)).backward()
        optimizer.step()
    """
    modules = [module for module in model.modules() if hasattr(module, "grad_averaging")]
    averaging: list[Any] = [module.grad_averaging for module in modules]
    if not modules:
        raise RotationError(
            f"{type(model).__name__} is not rotated; "
            "first call rotate_all, or rotate, on the whole model"
        )
    before = [each.postponed for each in averaging]
    for each in averaging:
        each.postponed = True
    try:
        yield
    finally:
        for each, postponed in zip(averaging, before, strict=True):
            each.postponed = postponed


def replicate(module: nn.Module, mesh: DeviceMesh, outer_dtype: torch.dtype | None = None) -> None:
    """Keep all parameters of the module that do not rotate whole on every rank, with equal values.

    Modules use them, and take their arguments, in ``outer_dtype``.

    Raises:
        RotationError: one is tied to a parameter that rotates, or is on another device; the message
            names it.
    """
    before = [p for p in module.parameters() if isinstance(p, DTensor)]
    copies: dict[nn.Parameter, nn.Parameter] = {}
    plain = plain_adapters(module)
    for path, child in list(module.named_modules()):
        loose = {
            name: p
            for name, p in parameters_of(child).items()
            if p is not None and not isinstance(p, DTensor)
        }
        for name, parameter in loose.items():
            if parameter not in copies:
                where = f"{path}.{name}".removeprefix(".")
                copies[parameter] = _whole(
                    parameter, where, mesh, as_dtensor=parameter not in plain
                )
                if copies[parameter] is not parameter:
                    note_replaced(parameter, where)
            setattr(child, name, copies[parameter])
        is_read = outer_dtype is not None or not plain.issuperset(loose.values())
        if loose and is_read and not isinstance(child, RotatedModule):
            mix_in(child, ReplicatedModule, "Replicated")
            child.outer_dtype = outer_dtype
    sharded = {
        found: name
        for name, parameter in module.named_parameters()
        if (found := sharded_parameters_of(parameter)) is not None
    }
    others = [p for p in before if sharded_parameters_of(p) is None]
    averaging = ReplicatedGradients([*copies.values()], mesh, sharded, others)
    module.grad_averaging = averaging  # type: ignore[assignment]  # kept alive, and a mark
    vars(module)[_PLAIN] = _PlainParameters(outer_dtype)
    module.register_forward_pre_hook(_before_forward)
    module.register_forward_hook(_put_back, always_call=True)
    module.register_forward_hook(_watch_outputs)
    module.register_state_dict_pre_hook(_before_state)  # type: ignore[no-untyped-call]


@uncompiled
def _before_forward(module: nn.Module, _args: Any) -> None:
    """See to parameters that changed since the last forward, and let modules read plain ones."""
    if torch.is_grad_enabled():
        averaging: Any = module.grad_averaging
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        averaging.require_known(trained)
        averaging.watch(p for p in module.parameters() if isinstance(p, DTensor))
        averaging.compare(module)
    vars(module)[_PLAIN].stand_in(module)


@uncompiled
def _watch_outputs(module: nn.Module, _args: Any, output: Any) -> Any:
    """After a forward: see [Note: Ranks that reach nothing].

    Raises:
        RotationError: the output was computed with a rank's shard in the place of a parameter.
    """
    if any(isinstance(leaf, DTensor) for leaf in tree_leaves(output, is_leaf=_is_no_container)):
        raise RotationError(f"{own_class(module).__name__} returns a DTensor: {_READS}")
    averaging: Any = module.grad_averaging
    if not (averaging.alone and torch.is_grad_enabled()):
        return output
    return tree_map_only(Tensor, averaging.reached, output, is_leaf=_is_no_container)


def _is_no_container(output: Any) -> bool:
    return not isinstance(output, tuple | list | dict)  # a cache stays the object that it is


_PLAIN = "plain_parameters"  # an attribute of models: their `_PlainParameters`
_READS = (
    "a forward reads a parameter of a layer that rotates, instead of calling the layer. Give the "
    "module whose forward reads it a rule, such as rules={Reader: "
    'ReadRule(names=("layer.weight",))}, which gathers it while that runs, read '
    "weight.full_tensor(), or keep the layer whole by rules={path: None}."
)


class _PlainParameters:
    """Plain tensors in the places of a model's replicated parameters, while its forward runs."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        """Parameters of modules never called are read in ``dtype``."""
        self._dtype = dtype
        self._places: list[tuple[dict[str, Any], str, torch.dtype | None]] | None = None
        self._replaced: list[tuple[dict[str, Any], str, DTensor]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "_PlainParameters":
        """That of a copied model, which finds its own places when it first runs."""
        return _PlainParameters(self._dtype)

    def stand_in(self, model: nn.Module) -> None:
        self.put_back()  # torch calls no hook after a forward that Ctrl-C has ended
        if self._places is None:
            self._places = [
                # called modules cast their parameters themselves
                (parameters_of(module), name, None if has_forward(module) else self._dtype)
                for module in model.modules()
                for name, parameter in list[tuple[str, Any]](parameters_of(module).items())
                if isinstance(parameter, DTensor) and place_of(parameter) is None
            ]
        for parameters, name, dtype in self._places:
            parameter: Any = parameters.get(name)
            if isinstance(parameter, DTensor):  # a model around this one may have been here before
                self._replaced.append((parameters, name, parameter))
                parameters[name] = cast(local_of(parameter), dtype)

    @property
    def are_there(self) -> bool:
        """Whether the model's forward runs."""
        return bool(self._replaced)

    def put_back(self) -> None:
        while self._replaced:
            parameters, name, parameter = self._replaced.pop()
            parameters[name] = parameter


@uncompiled
def _put_back(module: nn.Module, _args: Any, _output: Any) -> None:
    vars(module)[_PLAIN].put_back()
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError) and "DTensor" in str(error):
        error.add_note(f"{own_class(module).__name__}: {_READS}{_of_embeddings(module)}")


def _of_embeddings(model: nn.Module) -> str:
    """Says which embeddings were never called, so that a forward may read their weights."""
    read = [
        path
        for path, each in model.named_modules()
        if isinstance(each, nn.Embedding)
        and isinstance(each, RotatedModule)
        and not each.was_called
    ]
    rules = ", ".join(f'"*.{path.rpartition(".")[2]}": None' for path in read)
    return f" {read[0]} was never called: pass rules={{{rules}}}" if read else ""


def _before_state(module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    vars(module)[_PLAIN].put_back()


def _whole(source: nn.Parameter, name: str, mesh: DeviceMesh, *, as_dtensor: bool) -> nn.Parameter:
    """A parameter with the values of ``source``; NaN where that is on `meta`."""
    if sharded_parameters_of(source) is not None:
        raise RotationError(
            f"{name} is tied to a parameter that rotates; first rotate the module that it is in"
        )
    if source.is_meta:
        local = torch.full(source.shape, torch.nan, dtype=source.dtype, device=mesh.device_type)
    elif source.device.type != mesh.device_type:
        raise RotationError(
            f"{name} is on {source.device}, but the mesh is of {mesh.device_type}; "
            "move the model first"
        )
    elif not as_dtensor:
        return source
    else:
        local = source.detach().clone()
    if as_dtensor:
        return as_parameter(local, mesh, Replicate(), source)
    return nn.Parameter(local, source.requires_grad)


def register_forward_method(model: nn.Module, name: str) -> None:
    """Let a method of a rotated model read the model's own parameters, as its forward does.

    Outside a forward they are DTensors, which torch refuses next to plain tensors. A method that
    only calls modules inside needs no registration.

    Args:
        model: a rotated model, or a replicated module inside.
        name: of a method of its class; it is called as before.

    Raises:
        RotationError: the model was not rotated, or has no such method, or rotates as one block.

    Example:
        rotate_all(model, mesh=mesh)
        register_forward_method(model, "encode")
        loss = contrast(model.encode(images), model.encode(texts))
    """
    kind = own_class(model).__name__
    if not callable(getattr(own_class(model), name, None)):
        raise RotationError(f"{kind} has no method {name!r}")
    if isinstance(model, RotatedModule):
        raise RotationError(
            f"{kind} rotates as one block, and slices run its forward alone. Keep it from that by "
            "rotate_all(find_blocks=False), or call its forward"
        )
    if not hasattr(model, "grad_averaging") and not isinstance(model, ReplicatedModule):
        raise RotationError(f"{kind} is not rotated. First call rotate_all")
    vars(model)[name] = partial(_in_forward, model, name)


@uncompiled
def _in_forward(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the module's class between the hooks of the module's forward.

    The forward itself may call it, too.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        method = partial(getattr(own_class(module), name), module)
        if isinstance(module, ReplicatedModule):
            return module.run_plain(method, args, kwargs)
        return method(*args, **kwargs)

    plain = vars(module).get(_PLAIN)
    if plain is not None and plain.are_there:
        return run(*args, **kwargs)
    before = vars(module).get("forward")
    module.forward = run  # called by the module, after its hooks before a forward
    try:
        return module(*args, **kwargs)
    finally:
        del module.forward
        if before is not None:
            module.forward = before
