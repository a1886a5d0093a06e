"""Which modules are small, and which of them share a bundle."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from gyre_trainer.comm.spans import path_of
from gyre_trainer.rotation.bundles.bundle import Bundle
from gyre_trainer.rotation.bundles.whole_parameters import MAX_BUNDLE_NUMEL
from gyre_trainer.rotation.rotation import Rotation

# What a policy without a bound of its own calls small: 1.1 MiB in float32. Python and messages for
# slices of so few parameters take longer than the arithmetic. A larger module would fill more than
# a bundle.
SMALL_NUMEL = MAX_BUNDLE_NUMEL


def bundled(rotations: Sequence[Rotation]) -> Iterator[tuple[Bundle, list[Rotation]]]:
    """Bundles of those rotations that are small enough for their policy, in the given order.

    Modules inside one parent share a bundle if they fit into one. They are often called in another
    order than they are listed in, and two bundles in turns would be gathered again and again.
    """
    kinds: dict[Any, list[Rotation]] = {}
    for rotation in rotations:
        if _is_small(rotation):
            flat = rotation.sharded.flat
            kinds.setdefault((rotation.policy, flat.dtype, flat.device), []).append(rotation)
    for kind in kinds.values():
        members: list[Rotation] = []
        for siblings in _parts(kind):
            if members and _numel_of([*members, *siblings]) > MAX_BUNDLE_NUMEL:
                yield Bundle(members), members
                members = []
            members.extend(siblings)
        yield Bundle(members), members


def _parts(rotations: Sequence[Rotation]) -> Iterator[list[Rotation]]:
    """The rotations in groups that a bundle takes as a whole: siblings, if they fit into one."""
    for _, group in groupby(rotations, lambda each: path_of(each.module).rpartition(".")[0]):
        siblings = list(group)
        if _numel_of(siblings) <= MAX_BUNDLE_NUMEL:
            yield siblings
        else:
            yield from ([each] for each in siblings)


def _is_small(rotation: Rotation) -> bool:
    policy = rotation.policy
    bound = SMALL_NUMEL if policy.bundle_numel is None else policy.bundle_numel
    recomputed = policy.recompute and rotation.rule.recompute_pays
    encoded = not rotation.sharded.flat.is_floating_point()
    alone = recomputed or encoded or rotation.is_compiled
    return not alone and _numel_of([rotation]) <= bound


def _numel_of(rotations: Sequence[Rotation]) -> int:
    sharded = dict.fromkeys(rotation.sharded for rotation in rotations)
    return sum(sum(map(each.layout.numel, range(each.ring.size))) for each in sharded)
