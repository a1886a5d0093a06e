"""Rings over parts of the ranks that train the same model: replicas that nothing averages.

[Note: Rings beside each other]

Nothing is sent between two such rings, so each would train weights of its own, and no rank would
notice. A ring that is not of all ranks therefore writes into the store of the default group, before
its first optimizer step, which model it trains on which ranks. It looks for others there, then and
from time to time. The later ring finds the earlier one before its first step; the earlier one finds
the later one at its next look. No rank waits for another one. What is only evaluated, or steps by
no optimizer of torch, is not written.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gyre_trainer.comm.mesh import ring_group
from gyre_trainer.comm.ring import Ring
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.shards.replaced_parameters import ids_held_by

# A look is two requests to the store, some tenths of a millisecond. Rings that start together look
# at the same time, so the first steps all look.
_NUM_FIRST_LOOKS = 4
_LOOK_INTERVAL_S = 1.0


@dataclass(slots=True, eq=False)
class _Trained:
    """A model on a ring of a part of the ranks.

    Attributes:
        model: what was rotated.
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
