"""Parameters that every rank has whole: norms and other small ones.

Their gradients are averaged in one all-reduce per backward.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from itertools import compress
from types import MappingProxyType
from typing import Any, ClassVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from gyre_trainer.comm.mesh import groups_of
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.whole.adapters import plain_adapters, require_whole
from gyre_trainer.layers.whole.read_parameters import (
    CutPlace,
    ReadableParameters,
    keeps_dtype,
    own_parameters,
)
from gyre_trainer.rotation.bundles.whole_parameters import forget_whole
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in, own_class, uncompiled
from gyre_trainer.rotation.rule import swapped
from gyre_trainer.rotation.sharded_module import ShardedModule, copy_shards
from gyre_trainer.shards.gathered import release_after
from gyre_trainer.shards.local_shards import as_parameter, digest_of, local_of, spec_of, with_spec
from gyre_trainer.shards.replaced_parameters import note_replaced
from gyre_trainer.shards.sharded_parameters import sharded_parameters_of, successor_of
from gyre_trainer.shards.stand_ins import StandIn


class ReplicatedModule(ShardedModule):
    """Mixed in before a module's class: its forward reads plain local tensors instead of DTensors.

    Attributes:
        outer_dtype: the dtype that these, and the floating-point arguments, are cast to; None for
            no cast. Parameters of a BatchNorm stay in the dtype of its statistics.
        read_parameters: by their names, the places of those parameters of its own that are cut.
        reads_inside: whether the forward reads the parameters of modules inside instead of calling
            these.
    """

    reads_inside: ClassVar[bool] = False
    outer_dtype: torch.dtype | None = None
    read_parameters: Mapping[str, CutPlace] = MappingProxyType({})

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as without rotation."""
        assert isinstance(self, nn.Module)
        own = self._readable()
        if self.outer_dtype is not None:
            args, kwargs = tree_map_only(Tensor, self._cast, (args, kwargs))
        try:
            with swapped(self, own) if own else nullcontext():
                return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            if self.read_parameters:
                release_after(self)

    def _readable(self) -> dict[str, Tensor]:
        """What its forward is to read in the place of its parameters, where they are not that."""
        assert isinstance(self, nn.Module)
        if self.reads_inside:
            parameters = dict(self.named_parameters())
        else:
            parameters = {
                name: parameter
                for name, owner, last in own_parameters(self)
                if (parameter := owner._parameters[last]) is not None
            }
        if self.outer_dtype is None:
            parameters = {n: p for n, p in parameters.items() if isinstance(p, DTensor)}
        return {name: self._plain(name, parameter) for name, parameter in parameters.items()}

    def _plain(self, name: str, parameter: Tensor) -> Tensor:
        place = self.read_parameters.get(name)
        if place is not None and isinstance(parameter, DTensor):
            return place.instead(parameter)
        assert isinstance(self, nn.Module)
        dtype = None if keeps_dtype(self, parameter) else self.outer_dtype
        return cast(local_of(parameter), dtype)

    def _cast(self, tensor: Tensor) -> Tensor:
        return cast(tensor, self.outer_dtype)


class ReplicatedAttention(ReplicatedModule):
    """Mixed in before `nn.MultiheadAttention`, which reads the weight of its last layer."""

    reads_inside: ClassVar[bool] = True


class ReplicatedGradients:
    """Averages the gradients of replicated parameters over the ranks when a backward ends.

    The accumulated gradient is averaged. Its older part is either averaged already, and then equal
    on all ranks and its own mean, or was postponed and is averaged now.

    Attributes:
        postponed: whether backward leaves each rank its own gradients for now; `no_sync` sets it.
        ring: of this rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
        self.postponed = False
        self._given = list(parameters)
        self._mesh = mesh
        self._groups = groups_of(mesh)
        self.ring = ring_of(mesh)
        self._backward: int | None = None
        self._is_compared = False
        self._watched = WeakIdKeyDictionary()
        self.watch()

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """The parameters; others have taken their places where the model was converted."""
        if any(successor_of(each) is not None for each in self._given):
            self._given = [_now(each) for each in self._given]
        return self._given

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReplicatedGradients":
        """Averages the gradients of the copied model's parameters."""
        copy_shards(self._parameters, memo)
        return ReplicatedGradients([deepcopy(p, memo) for p in self._parameters], self._mesh)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._watched

    def add(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of plain parameters, too; they take the first rank's values."""
        for parameter in parameters:
            _take_first_ranks_values(parameter, self._mesh)
        self._given += parameters

    def watch(self, others: Iterable[nn.Parameter] = ()) -> None:
        """Average the gradients of all parameters that are trainable now, frozen before or not.

        A backward that reaches one of ``others`` averages them, too. Those rotate, so all ranks
        reach them: a rank that reaches no replicated parameter must take part all the same, or its
        next collective would be taken for the mean.
        """
        # a hook with a strong reference would keep both alive
        touched = partial(_touched, ref(self))
        for parameter in (*self._parameters, *others):
            if parameter.requires_grad and parameter not in self._watched:
                self._watched[parameter] = True
                parameter.register_post_accumulate_grad_hook(touched)  # type: ignore[no-untyped-call]

    def compare(self, model: nn.Module) -> None:
        """The first time, refuse values that differ among the ranks; collective.

        Of a buffer that differs there is a warning, as statistics of a rank's own data may.

        Raises:
            RotationError: on every rank, with the first such parameter of the model.
        """
        if self._is_compared:
            return
        buffers = dict(model.named_buffers())
        values = [local_of(each).detach() for each in (*self._parameters, *buffers.values())]
        if any(isinstance(each, FakeTensor) for each in values):
            return
        self._is_compared = True
        digests = [digest_of(each) for each in values]
        extremes = torch.tensor(
            [digests, [-each for each in digests]], device=self._mesh.device_type
        )
        with self.ring.hang_diagnosis.collective("comparing replicated parameters"):
            for group in self._groups:
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        differs = extremes.sum(0).ne(0).tolist()
        num_parameters = len(self._parameters)
        different = set(compress(self._parameters, differs))
        if different:
            name = next(name for name, p in model.named_parameters() if p in different)
            raise RotationError(
                f"{name} of {own_class(model).__name__} has other values on one rank than on "
                "another, so they would train different models; give all ranks the same values, "
                "with one seed, one checkpoint or sync_from=0"
            )
        if others := list(compress(buffers, differs[num_parameters:])):
            warnings.warn(
                f"{others[0]} of {own_class(model).__name__}, a buffer, has other values on one "
                "rank than on another, so their outputs differ; give all ranks the same ones, with "
                "one checkpoint or sync_from=0",
                stacklevel=2,
            )

    def touched(self) -> None:
        """Note that a gradient was computed; the end of this backward averages all gradients."""
        if self.ring.num_parts == 1:
            return  # one rank's gradients are their own mean
        # not a flag: a backward that fails ends without its callbacks
        backward = torch._C._current_graph_task_id()
        if self._backward != backward and not self.postponed:
            self._backward = backward
            Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        """Average what the ranks have.

        A rank without a gradient, whose call left the module out, has zeros. So all ranks send the
        same parameters. Behind the gradients is a number for each: whether any rank has it.
        """
        parameters = [p for p in self._parameters if p.requires_grad]
        if not parameters:
            return
        has = [p.grad is not None for p in parameters]
        grads = [
            torch.zeros_like(local_of(p)) if p.grad is None else local_of(p.grad)
            for p in parameters
        ]
        used = grads[0].new_tensor(has)
        flat = torch.cat([*(grad.flatten() for grad in grads), used])
        with self.ring.hang_diagnosis.collective("averaging gradients of replicated parameters"):
            for group in self._groups:
                dist.all_reduce(flat, group=group)
        *sums, used = torch.split(flat, [*(grad.numel() for grad in grads), len(grads)])
        # a rank reads this only where it lacks a gradient: on CUDA it waits for the device
        by_any = has if all(has) or isinstance(flat, FakeTensor) else used.gt(0).tolist()
        for parameter, grad, total, there, wanted in zip(
            parameters, grads, sums, has, by_any, strict=True
        ):
            grad.copy_(total.div_(self.ring.num_parts).view_as(grad))
            if wanted and not there:
                spec = spec_of(parameter)
                parameter.grad = grad if spec is None else with_spec(grad, spec)


def _now(parameter: nn.Parameter) -> nn.Parameter:
    """What a parameter has become by conversions of the model."""
    while (successor := successor_of(parameter)) is not None:
        parameter = successor
    return parameter


def _touched(grad_averaging: "ref[ReplicatedGradients]", parameter: Tensor) -> None:
    there = grad_averaging()
    if there is not None:
        there.touched()


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
    sharded = [
        module.rotation.sharded.replica_gradients
        for module in model.modules()
        if isinstance(module, RotatedModule)
    ]
    sharded += [
        place.sharded.replica_gradients
        for module in model.modules()
        if isinstance(module, ReplicatedModule)
        for place in module.read_parameters.values()
    ]
    averaging += filter(None, sharded)
    if not modules and not sharded:
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
    """Keep all parameters of the module that do not rotate whole on every rank.

    Modules use them, and take their arguments, in ``outer_dtype``.

    Raises:
        RotationError: one is tied to a parameter that rotates, or is on another device; the message
            names it.
    """
    copies: dict[nn.Parameter, nn.Parameter] = {}
    plain = dict.fromkeys(plain_adapters(module))
    for parameter in plain:
        _take_first_ranks_values(parameter, mesh)
    for path, child in list(module.named_modules()):
        loose = {
            name: p
            for name, p in child._parameters.items()
            if p is not None and not isinstance(p, DTensor)
        }
        if outer_dtype is None:
            loose = {name: p for name, p in loose.items() if p not in plain}
        for name, parameter in loose.items():
            if parameter in plain:
                continue
            if parameter not in copies:
                where = f"{path}.{name}".removeprefix(".")
                copies[parameter] = _replicated(parameter, where, mesh)
                note_replaced(parameter, where)
            setattr(child, name, copies[parameter])
        if loose and not isinstance(child, RotatedModule):
            attends = isinstance(child, nn.MultiheadAttention)
            if not isinstance(child, ReplicatedModule):
                mix_in(child, ReplicatedAttention if attends else ReplicatedModule, "Replicated")
            child.outer_dtype = outer_dtype
    module.grad_averaging = ReplicatedGradients([*copies.values(), *plain], mesh)  # type: ignore[assignment]  # kept alive, and a mark
    module.register_forward_pre_hook(_watch)
    ReadableParameters(module, outer_dtype)


@uncompiled
def _watch(module: nn.Module, _args: Any) -> None:
    """Before a forward: see to parameters that changed since the last one."""
    forget_whole(module.grad_averaging.ring)  # type: ignore[union-attr,arg-type]
    if not torch.is_grad_enabled():
        return
    averaging: Any = module.grad_averaging
    added = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
        and not isinstance(parameter, (DTensor, StandIn))
        and parameter not in averaging
    }
    if added:
        adapters = set(plain_adapters(module))
        for name, parameter in added.items():
            if parameter not in adapters:
                raise RotationError(
                    f"{name} was added to {type(module).__name__} after it was rotated, so its "
                    "gradient would never be averaged; add layers first, then rotate the model"
                )
        require_whole(module)
        averaging.add(list(added.values()))
    averaging.watch(p for p in module.parameters() if isinstance(p, DTensor))
    averaging.compare(module)


def _take_first_ranks_values(tensor: Tensor, mesh: DeviceMesh) -> None:
    for group in groups_of(mesh):
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def _replicated(source: nn.Parameter, name: str, mesh: DeviceMesh) -> nn.Parameter:
    """A DTensor parameter with the values of rank 0; NaN where ``source`` is on `meta`."""
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
    else:
        local = source.detach().clone()
        _take_first_ranks_values(local, mesh)
    return as_parameter(local, mesh, Replicate(), source)
