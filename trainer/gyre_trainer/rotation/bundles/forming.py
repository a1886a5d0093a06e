"""Which modules are small, and which of them share a bundle."""

from collections.abc import Iterator, Sequence
from typing import Any

from gyre_trainer.rotation.bundles.bundle import Bundle
from gyre_trainer.rotation.rotation import Rotation

# What a policy without a bound of its own calls small: 1 MiB in float32. With slices of so few
# parameters, Python and messages take longer than the arithmetic.
SMALL_NUMEL = 2**18
# Elements of a bundle. A rank holds as many whole while it computes with them, and as many
# gradients in backward. Half of it doubles the messages of a model with many small modules.
_MAX_BUNDLE_NUMEL = 2**18


def bundled(rotations: Sequence[Rotation]) -> Iterator[tuple[Bundle, list[Rotation]]]:
    """Bundles of those rotations that are small enough for their policy, in the given order."""
    kinds: dict[Any, list[Rotation]] = {}
    for rotation in rotations:
        if _is_small(rotation):
            flat = rotation.sharded.flat
            kinds.setdefault((rotation.policy, flat.dtype, flat.device), []).append(rotation)
    for kind in kinds.values():
        members: list[Rotation] = []
        for rotation in kind:
            if members and _numel_of([*members, rotation]) > _MAX_BUNDLE_NUMEL:
                yield Bundle(members), members
                members = []
            members.append(rotation)
        yield Bundle(members), members


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
