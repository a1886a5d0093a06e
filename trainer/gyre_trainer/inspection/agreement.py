"""Checks before training that all ranks have the same model.

Rings over parts of the ranks that train the same model: replicas that nothing averages.

[Note: Rings beside each other]

Nothing is sent between two such rings, so each would train weights of its own, and no rank would
notice. A ring that is not of all ranks therefore writes into the store of the default group, before
its first optimizer step, which model it trains on which ranks. It looks for others there, then and
from time to time. The later ring finds the earlier one before its first step; the earlier one finds
the later one at its next look. No rank waits for another one. What is only evaluated, or steps by
no optimizer of torch, is not written.

All ranks of a ring learn at once that one of them refuses a module.

A rank that refuses alone goes on without the module's hops. The others would wait for these until
the timeout, if its process lives on. The ring stays usable.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gyre_trainer.comm.mesh import groups_of, ring_group
from gyre_trainer.comm.ring import Ring
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.rotated_module import RotatedModule, own_class
from gyre_trainer.rotation.rule import Rotation
from gyre_trainer.shards.averaging import ids_held_by
from gyre_trainer.shards.local_shards import digest_of
from gyre_trainer.shards.sharded_parameters import sharded_parameters_of

_Here = TypeVar("_Here")


def require_equal_models(model: nn.Module, mesh: DeviceMesh) -> None:
    """Return if every rank on the mesh has the same parameters, cut alike, under the same policies.

    Compared are names, shapes, dtypes, kinds of device, `requires_grad`, cuts, a digest of the
    values, and the policies of rotated modules. Collective.

    Raises:
        RotationError: on every rank, with the first difference between two ranks.
    """
    here = _parameters(model), _policies(model), _values(model)
    digest = int.from_bytes(
        blake2b("\n".join(chain(*here)).encode(), digest_size=7).digest(), "little"
    )
    extremes = torch.tensor([digest, -digest], device=mesh.device_type)
    for group in groups_of(mesh):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    # A dry run has no other ranks.
    if isinstance(extremes, FakeTensor) or extremes.sum().item() == 0:
        return
    everyone = _gathered((dist.get_rank(), here), mesh)
    _count_alike(mesh)
    ranks = [rank for rank, _ in everyone]
    parts = zip(*(each for _, each in everyone), strict=True)
    difference = next(filter(None, (_difference(ranks, descriptions) for descriptions in parts)))
    advice = (
        "; give every rank the same values, or take those of one with sync_from=0"
        if "has values of digest" in difference
        else ""
    )
    raise RotationError(f"ranks have different models: {difference}{advice}")


def _count_alike(mesh: DeviceMesh) -> None:
    """Let all ranks go on with one number, so that another model can rotate after a refusal."""
    modules = ring_of(mesh).modules
    modules.skip_to(max(_gathered(modules.count, mesh)))


def _gathered(here: _Here, mesh: DeviceMesh) -> list[_Here]:
    """Every rank's value, in the order of the mesh."""
    gathered = [here]
    for group in groups_of(mesh):
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, gathered, group=group)
        gathered = list(chain.from_iterable(parts))
    return gathered


def _parameters(model: nn.Module) -> list[str]:
    """A line that describes each parameter."""
    lines = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            cut = f", cut {parameter.placements[-1]}" if isinstance(parameter, DTensor) else ""
            state = "trains" if parameter.requires_grad else "is frozen"
            where = f"{path}.{name}".removeprefix(".")
            kind = f"{parameter.dtype} on {parameter.device.type}, {state}{cut}"
            lines.append(
                f"{where} of {own_class(module).__name__} is {tuple(parameter.shape)} {kind}"
            )
    return lines


def _values(model: nn.Module) -> list[str]:
    """A line for each parameter that tells its values apart; those of shards are of the whole."""
    lines = []
    for name, parameter in model.named_parameters():
        sharded = sharded_parameters_of(parameter)
        if sharded is not None:
            pairs = zip(sharded.parameters, sharded.digests, strict=True)
            digest = next((digest for other, digest in pairs if other is parameter), 0)
        else:
            digest = 0 if isinstance(parameter, DTensor) else digest_of(parameter)
        lines.append(f"{name} has values of digest {digest:012x}")
    return lines


def _policies(model: nn.Module) -> list[str]:
    """A line that describes the policy of each rotated module."""
    rotated = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, RotatedModule)
    ]
    return [
        f"{path or type(module).__name__} rotates with {module.rotation.policy}"
        for path, module in rotated
    ]


def _difference(ranks: Sequence[int], descriptions: Sequence[list[str]]) -> str:
    """The first difference between the first rank and another one; "" where there is none."""
    first = descriptions[0]
    for rank, other in zip(ranks, descriptions, strict=True):
        longest = max(len(first), len(other))
        pairs = zip(
            *(
                each + ["there is no more parameter"] * (longest - len(each))
                for each in (first, other)
            ),
            strict=True,
        )
        for one, another in pairs:
            if one != another:
                return f"on rank {ranks[0]} {one}, but on rank {rank} {another}"
    return ""


# A look is two requests to the store, some tenths of a millisecond. Rings that start together look
# at the same time, so the first steps all look.
_NUM_FIRST_LOOKS = 4
_LOOK_INTERVAL_S = 1.0


@dataclass(slots=True, eq=False)
class _Trained:
    """A model on a ring of a part of the ranks.

    Attributes:
        model: the rotated model.
        ring: its ring, as long as something rotates on it.
        ranks: all ranks of its mesh.
        key: of the model in the store; "" until an optimizer's first step.
        num_looks: how often this rank has looked.
        next_look_s: when it looks again, by the monotonic clock.
    """

    model: ref[nn.Module]
    ring: ref[Ring]
    ranks: list[int]
    key: str = ""
    num_looks: int = 0
    next_look_s: float = 0.0

    def look(self) -> None:
        """Raise an error where another ring trains the same model.

        Raises:
            RotationError: on every rank of the ring.
        """
        now_s = time.monotonic()
        if self.num_looks >= _NUM_FIRST_LOOKS and now_s < self.next_look_s:
            return
        self.num_looks += 1
        self.next_look_s = now_s + _LOOK_INTERVAL_S
        others: list[list[int]] = []
        # the store ends with the rank that serves it, and the group with the program
        with suppress(RuntimeError, ValueError):
            store = PrefixStore("gyre rings", _get_default_store())
            others = _listed(store, self.key, self.ranks)
        for other in others:
            if not set(other) & set(self.ranks):
                self._refuse(other)

    def _refuse(self, other: Sequence[int]) -> None:
        model, ring = self.model(), self.ring()
        if model is None or ring is None:
            return
        size = len(self.ranks)
        error = ring.hang_diagnosis.mispaired(
            f"rank {dist.get_rank()}: before the optimizer's step",
            f"{_named(self.ranks)} and {_named(other)} train the same {own_class(model).__name__} "
            "on two rings, and nothing averages their gradients, so each ring would train "
            "weights of its own. Make one mesh of all ranks, such as make_mesh(device_type, "
            f"replicate={max(2, dist.get_world_size() // size)}, rotate={size}), on each of them. "
            "Where the rings are to train apart, pass independent=True to rotate_all or rotate",
        )
        ring.give_up()
        raise error


class _Rings:
    """The models of this process on rings of a part of the ranks."""

    def __init__(self) -> None:
        self._noted: list[_Trained] = []
        self._num_noted = 0
        self._seen: WeakKeyDictionary[Optimizer, tuple[int, list[int]]] = WeakKeyDictionary()
        self._stepped: WeakKeyDictionary[Optimizer, list[_Trained]] = WeakKeyDictionary()

    def note(self, model: nn.Module, mesh: DeviceMesh, *, independent: bool) -> None:
        inside = set(model.modules())
        self._noted = [
            each
            for each in self._noted
            if (there := each.model()) is not None and there not in inside
        ]
        self._num_noted += 1
        if not independent:
            ranks = sorted(mesh.mesh.flatten().tolist())
            self._noted.append(_Trained(ref(model), ref(ring_of(mesh)), ranks))

    def before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        seen = self._num_noted, ids_held_by(optimizer)
        if self._seen.get(optimizer) != seen:
            self._seen[optimizer] = seen
            self._stepped[optimizer] = list(self._trained_by(set(seen[1])))
        for each in self._stepped[optimizer]:
            each.look()

    def _trained_by(self, held: set[int]) -> Iterator[_Trained]:
        for each in self._noted:
            model = each.model()
            if model is not None and any(id(p) in held for p in model.parameters()):
                each.key, each.num_looks = _key(model), 0
                yield each


_RINGS = _Rings()


def note_ring(model: nn.Module, mesh: DeviceMesh, *, independent: bool) -> None:
    """From now on a ring of a part of the ranks is compared with others that train the same model.

    See [Note: Rings beside each other].

    Args:
        model: rotated on the mesh; what was noted of modules inside is forgotten.
        mesh: its mesh; with all ranks on it nothing can be beside it.
        independent: whether the ring is meant to train apart, so that it is not compared.
    """
    if mesh.size() == dist.get_world_size() or dist.get_backend(ring_group(mesh)) == "fake":
        return
    if not _RINGS._num_noted:
        register_optimizer_step_pre_hook(_RINGS.before_step)
    _RINGS.note(model, mesh, independent=independent)


def _key(model: nn.Module) -> str:
    """Of a model's parameters: names, shapes, dtypes, and which of them train."""
    lines = [
        f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}"
        for name, p in model.named_parameters()
    ]
    return blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _listed(store: Store, key: str, ranks: list[int]) -> list[list[int]]:
    """The ranks of all rings that train a model; ``ranks`` are among them from now on."""
    while True:
        stored = store.get(key).decode() if store.check([key]) else ""
        rings: list[list[int]] = json.loads(stored) if stored else []
        if ranks in rings:
            return rings
        rings.append(ranks)
        wanted = json.dumps(rings)
        if store.compare_set(key, stored, wanted).decode() == wanted:
            return rings


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


@contextmanager
def refusing_together(rotation: Rotation) -> Iterator[None]:
    """A context for checks of a module; what one rank raises ends the checks of all. Collective.

    The checks themselves must not communicate.

    Raises:
        RotationError: another rank of the ring refuses the module; the message has its words.
    """
    try:
        yield
    except Exception as error:
        refuse_together(rotation, str(error))
        raise
    refuse_together(rotation, "")


def refuse_together(rotation: Rotation, reason: str) -> None:
    """Return where no rank has a reason, and on those that have one. Collective.

    Args:
        rotation: of the module.
        reason: why this rank refuses it; "" where it does not.

    Raises:
        RotationError: on the ranks without a reason, where another one has one.
    """
    flat = rotation.sharded.flat
    if isinstance(flat, FakeTensor):
        return
    parameter = rotation.sharded.parameters[0]
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    group, ring = ring_group(mesh), ring_of(mesh)
    refusing = torch.tensor([ring.rank + 1 if reason else 0], device=flat.device)
    with ring.hang_diagnosis.collective("comparing what ranks say of a rotated module"):
        dist.all_reduce(refusing, dist.ReduceOp.MAX, group=group)
        if not refusing.item():
            return
        source = dist.get_global_rank(group, int(refusing.item()) - 1)
        words = [reason]
        dist.broadcast_object_list(words, src=source, group=group, device=flat.device)
    if not reason:
        raise RotationError(f"rank {source} refuses {rotation.name}: {words[0]}")
