"""The mean over the ranks of gradients of parameters that every rank has whole.

With several rings, also that over the replicas of a shard. Both are formed when backward ends.

[Note: Ranks that reach nothing]

All ranks must take part in the mean. The backward of one rank may reach no replicated parameter,
because its forward left their modules out: it has zeros then. If it did not take part, its next
collective would be taken for the mean. So a backward also counts that reaches a parameter that
rotates. Where none of these is trained, as with adapters, a backward counts that reaches an
output of the model.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial, reduce
from itertools import compress
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from gyre_trainer.comm.identity import on_device
from gyre_trainer.comm.mesh import groups_of
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.rotated_module import copy_shards, own_class
from gyre_trainer.shards.layout import digest_of, local_of, with_spec
from gyre_trainer.shards.sharded_parameters import (
    ShardedParameters,
    refuse_hooks,
    sharded_parameters_of,
)
from gyre_trainer.torch_internals import at_end_of_backward, is_fake, number_of_backward, spec_of

# A bucket of gradients is averaged at once: 25 MiB in float32, as in DDP. Smaller ones take more
# collectives, a larger one more memory.
_BUCKET_NUMEL = 25 * 2**18
_PLAIN = (Tensor, nn.Parameter)  # tensors of other classes may take no hook


class ReplicatedGradients:
    """Averages the gradients of replicated parameters over the ranks when a backward ends.

    So it does those of shards over the replicas of the ring.

    The accumulated gradient is averaged. Its older part is either averaged already, and then equal
    on all ranks and its own mean, or was postponed and is averaged now.

    Attributes:
        postponed: whether backward leaves each rank its own gradients for now; `no_sync` sets it.
        ring: of this rank.
        alone: whether no parameter that rotates was trained when the model was last called.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        mesh: DeviceMesh,
        sharded: Mapping[ShardedParameters, str],
        others: Iterable[nn.Parameter],
    ) -> None:
        """Average the gradients of ``parameters``, and of those ``sharded``, given with names.

        ``others`` are DTensors whose gradients other code averages.
        """
        self.postponed = False
        self.alone = False
        self._parameters = list(parameters)
        self._mesh = mesh
        self._groups = groups_of(mesh)
        self.ring = ring_of(mesh)
        self._backward: int | None = None
        self._is_compared = False
        self._watched = WeakIdKeyDictionary()
        self._others = WeakIdKeyDictionary(dict.fromkeys(others, True))
        self._sharded = {each: name for each, name in sharded.items() if each.watch is None}
        self._are_shards_compared = False
        for each in self._sharded:
            # a strong reference would keep both alive
            each.watch = partial(_watch_shards, ref(self))
        self.watch()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReplicatedGradients":
        """Averages the gradients of the copied model's parameters."""
        copy_shards([*self._parameters, *self._others], memo)
        copy_shards([p for each in self._sharded for p in each.parameters], memo)
        return ReplicatedGradients(
            [deepcopy(p, memo) for p in self._parameters],
            self._mesh,
            {memo[id(each)]: name for each, name in self._sharded.items()},
            [deepcopy(p, memo) for p in self._others],
        )

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._watched

    def require_known(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Require that each of these is one whose gradient is averaged.

        Raises:
            RotationError: one was put into the model after it was rotated.
        """
        known = {id(each) for each in (*self._parameters, *self._others)}
        for name, parameter in parameters.items():
            if id(parameter) not in known and sharded_parameters_of(parameter) is None:
                raise RotationError(
                    f"{name} is another parameter than the model was rotated with, so its gradient "
                    "would not be averaged. Add layers and adapters (get_peft_model) before "
                    "rotate_all, and write to the present parameters (copy_, "
                    "load_state_dict without assign)."
                )

    def watch(self, others: Iterable[nn.Parameter] = ()) -> None:
        """Average the gradients of all parameters trainable now, frozen before or not.

        A backward that reaches one of ``others`` averages them, too. Those rotate, so all ranks
        reach them. See [Note: Ranks that reach nothing].
        """
        own = dict.fromkeys(self._parameters)
        others = [each for each in others if each not in own]
        self.alone = any(p.requires_grad for p in own) and not any(p.requires_grad for p in others)
        self._watch((*own, *others))
        if self.ring.num_parts > 1:
            for parameter in own:
                refuse_hooks(parameter)

    def watch_shards(self, shards: Iterable[nn.Parameter]) -> None:
        """Average the gradients of these shards over the replicas, frozen before or not."""
        self._watch(shards)
        for parameter in shards:
            refuse_hooks(parameter)

    def _watch(self, parameters: Iterable[nn.Parameter]) -> None:
        touched = partial(_touched, ref(self))
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._watched:
                self._watched[parameter] = True
                parameter.register_post_accumulate_grad_hook(touched)  # type: ignore[no-untyped-call]

    def reached(self, output: Tensor) -> Tensor:
        """An output of the model: a backward that reaches it averages the gradients.

        It takes a gradient even where this rank called nothing that trains.
        """
        if type(output) not in _PLAIN or not output.is_floating_point():
            return output
        if not output.requires_grad:
            anchor = output.new_empty(0).requires_grad_()
            output = _TakesGradient.apply(anchor, output)  # type: ignore[no-untyped-call]
        output.register_hook(partial(_touched, ref(self)))  # type: ignore[no-untyped-call]
        return output

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
        if any(is_fake(each) for each in values):
            return
        self._is_compared = True
        differs: list[bool] = self._differ(values, self._groups).tolist()
        num_parameters = len(self._parameters)
        different = set(compress(self._parameters, differs))
        if different:
            name = next(name for name, p in model.named_parameters() if p in different)
            raise RotationError(
                f"{name} of {own_class(model).__name__} has other values on one rank than on "
                "another, so they would train different models. Give all ranks the same values, "
                "with one seed, one checkpoint or sync_from=0."
            )
        if others := list(compress(buffers, differs[num_parameters:])):
            warnings.warn(
                f"{others[0]} of {own_class(model).__name__}, a buffer, has other values on one "
                "rank than on another, so their outputs differ; give all ranks the same ones, with "
                "one checkpoint or sync_from=0",
                stacklevel=2,
            )

    def _differ(self, values: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> Tensor:
        """Which of the values are others on some rank of the groups; collective."""
        digests = [digest_of(each) for each in values]
        extremes = torch.tensor(
            [digests, [-each for each in digests]], device=self._mesh.device_type
        )
        with self.ring.hang_diagnosis.collective("comparing parameters"):
            for group in groups:
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        return extremes.sum(0).ne(0)

    def _compare_shards(self, replicas: dist.ProcessGroup) -> None:
        """The first time, refuse shards that differ among the replicas of the ring; collective.

        Raises:
            RotationError: on every rank of all replicas.
        """
        flats = [each.flat for each in self._sharded]
        if self._are_shards_compared or any(map(is_fake, flats)):
            return
        self._are_shards_compared = True
        differs = self._differ(flats, [replicas]).int()
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=self.ring.group)
        for name in compress(self._sharded.values(), differs.tolist()):
            raise RotationError(
                f"{name} has other values in one replica of the ring than in another, so they "
                "would train different models. Give all ranks the same values, with one seed, one "
                "checkpoint or sync_from=0."
            )

    def touched(self) -> None:
        """Note that a gradient was computed; the end of this backward averages all gradients."""
        if self.ring.num_parts == 1:
            return  # one rank's gradients are their own mean
        # not a flag: a backward that fails ends without its callbacks
        backward = number_of_backward()
        if self._backward != backward and not self.postponed:
            self._backward = backward
            at_end_of_backward(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        """Average the ranks' gradients, once all ranks say that they train the same parameters.

        A rank without a gradient, whose call left the module out, has zeros. So all ranks send the
        same gradients.
        """
        self.ring.settle()
        replicas, shards = self.ring.replicas, list[nn.Parameter]()
        if replicas is not None and self._sharded:
            self._compare_shards(replicas)
            shards = [p for each in self._sharded for p in each.parameters]
        parameters = [*shards, *self._parameters]
        if not parameters:
            return
        with self.ring.hang_diagnosis.collective("averaging gradients"):
            used = self._users_of(parameters)
            grads = [_grad_of(p) if p.requires_grad else None for p in parameters]
            if replicas is not None:
                self._average_shards([g for g in grads[: len(shards)] if g is not None], replicas)
            whole = [g for g in grads[len(shards) :] if g is not None]
            for grad, total in zip(whole, self._added_up(whole), strict=True):
                grad.copy_(total.div_(self.ring.num_parts).view_as(grad))
        _give_grads(parameters, grads, used)

    def _users_of(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """On how many ranks each parameter has a gradient; collective.

        Raises:
            RotationError: ranks train different ones. On CUDA it is raised before the optimizer's
                step.
        """
        has = [p.requires_grad and p.grad is not None for p in parameters]
        like = torch.empty(0, device=self._mesh.device_type)
        numbers = on_device([*has, *(p.requires_grad for p in parameters)], like)
        for group in self._groups:
            dist.all_reduce(numbers, group=group)
        used, trains = torch.split(numbers, len(parameters))
        self._require_one_choice(parameters, trains)
        return used

    def _average_shards(self, grads: Sequence[Tensor], replicas: dist.ProcessGroup) -> None:
        """Average the gradients of a rank's shards over the replicas, in place."""
        works = [dist.all_reduce(g, group=replicas, async_op=True) for g in grads if g.numel()]
        for work in works:
            work.wait()
        for grad in grads:
            grad.div_(replicas.size())

    def _added_up(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums of the tensors over all ranks, flat and in float32 or wider; collective."""
        sums = list[Tensor]()
        for bucket in _buckets(tensors):
            wide = reduce(torch.promote_types, {t.dtype for t in bucket}, torch.float32)
            flat = torch.cat([each.flatten().to(wide) for each in bucket])
            for group in self._groups:
                dist.all_reduce(flat, group=group)
            sums += torch.split(flat, [each.numel() for each in bucket])
        return sums

    def _require_one_choice(self, parameters: Sequence[nn.Parameter], num_trains: Tensor) -> None:
        """Refuse ranks that train others of the parameters than this one.

        Args:
            parameters: trained, or not.
            num_trains: on how many ranks each is trained.
        """
        # a group of the backend "fake" adds nothing up
        is_added = all(dist.get_backend(group) != "fake" for group in self._groups)
        if is_fake(num_trains) or not is_added:
            return
        is_mixed = ((num_trains > 0) & (num_trains < self.ring.num_parts)).any()
        self.ring.checks.require(is_mixed, 0, lambda _: self._refuse(parameters, num_trains))

    def _refuse(self, parameters: Sequence[nn.Parameter], num_trains: Tensor) -> None:
        for parameter, num in zip(parameters, num_trains.tolist(), strict=True):
            if 0 < num < self.ring.num_parts:
                raise RotationError(
                    f"a parameter of shape {tuple(parameter.shape)} trains on {num:.0f} of "
                    f"{self.ring.num_parts} ranks, so its mean would lack gradients. Freeze and "
                    "unfreeze the same parameters on all ranks (requires_grad_)."
                )


def _grad_of(parameter: nn.Parameter) -> Tensor:
    """This rank's gradient. Where its call left the module out, it has zeros, so that all send."""
    if parameter.grad is None:
        return torch.zeros_like(local_of(parameter))
    return local_of(parameter.grad)


def _give_grads(
    parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None], used: Tensor
) -> None:
    """Give parameters the averages that they lack.

    Args:
        parameters: on all ranks the same.
        grads: their averages; None for a frozen one.
        used: how many ranks had a gradient of each.
    """
    missing = [g is not None and p.grad is None for p, g in zip(parameters, grads, strict=True)]
    if not any(missing) or is_fake(used):
        return
    by_any = used.gt(0).tolist()  # on CUDA it waits for the device
    for parameter, grad, lacks, wanted in zip(parameters, grads, missing, by_any, strict=True):
        if grad is not None and lacks and wanted:
            spec = spec_of(parameter)
            parameter.grad = grad if spec is None else with_spec(grad, spec)


def _watch_shards(
    grad_averaging: "ref[ReplicatedGradients]", shards: Sequence[nn.Parameter]
) -> None:
    _present(grad_averaging).watch_shards(shards)


def _present(grad_averaging: "ref[ReplicatedGradients]") -> ReplicatedGradients:
    there = grad_averaging()
    if there is None:
        raise RotationError(
            "a module trains whose rotated model is gone, so nothing averages its gradients. Keep "
            "the model that rotate_all or rotate was called with, or rotate the module itself"
        )
    return there


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in their order, several together up to a size."""
    bucket, numel = list[Tensor](), 0
    for each in tensors:
        if bucket and numel + each.numel() > _BUCKET_NUMEL:
            yield bucket
            bucket, numel = [], 0
        bucket.append(each)
        numel += each.numel()
    if bucket:
        yield bucket


class _TakesGradient(torch.autograd.Function):
    """The second argument, with a gradient as the first one takes it; neither gets one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def _touched(grad_averaging: "ref[ReplicatedGradients]", parameter: Tensor) -> None:
    _present(grad_averaging).touched()
