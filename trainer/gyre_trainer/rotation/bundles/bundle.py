"""Small modules that travel together, and are computed whole.

[Note: Bundles]

A visit of a slice costs Python, however small the slice is, and a hop costs a message. So small
modules of a model are put into bundles. At the first call of a module in a bundle, the slices of
all its modules go round the ring in one buffer, and each rank puts the whole parameters together.
Modules then run as they are, each once. Autograd knows when the last of them has its gradients:
these go round the ring in one buffer, too, and each rank keeps the sum for its own slice.

A rank holds the whole parameters of few bundles at a time (`whole_parameters`). What autograd would
save of them is replaced by its place, and the first of a bundle's modules in backward gathers them
again, as FSDP2 does. Where all bundles of a model fit, weights travel once for forward and
backward. Without gradients, the whole parameters are kept until others need the room or until they
change.

Parameters that no rank used must get no gradient, and one that only some ranks used is an error. So
behind each slice's gradients travels one number for each parameter: the share of the ranks that
have a gradient of it.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from gyre_trainer.comm.spans import path_of, span
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.backward.deferred_grads import DeferredGrads
from gyre_trainer.rotation.bundles.travel import Travel
from gyre_trainer.rotation.bundles.whole_parameters import WholeParameters
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.rotation.rule import ModuleSlice, parameter_at, swapped
from gyre_trainer.shards.layout import Layout
from gyre_trainer.shards.local_shards import local_of


class Bundle:
    """Small modules whose parameters travel together. See [Note: Bundles]."""

    def __init__(self, rotations: Sequence[Rotation]) -> None:
        """``rotations`` have one policy, dtype, device and ring."""
        self._rotations = list(rotations)
        self._number = rotations[0].sharded.ring.modules.add(rotations[0].module)
        self._form()

    def _form(self) -> None:
        """Let the parameters of the members travel from now on."""
        rotations = self._rotations
        sharded = list(dict.fromkeys(rotation.sharded for rotation in rotations))
        names = {rotation.sharded: path_of(rotation.module) for rotation in reversed(rotations)}
        cuts = [
            replace(cut, name=f"{place}: {names[each]}.{cut.name}", padded=False)
            for place, each in enumerate(sharded)
            for cut in each.layout.cuts
        ]
        layout = Layout(tuple(cuts), sharded[0].ring.size)
        sharded[0].ring.modules.set_bundle(self._number, [each.module for each in rotations])
        starts = accumulate((len(each.layout.cuts) for each in sharded), initial=0)
        self._starts = dict(zip(sharded, starts, strict=False))
        self._whole = WholeParameters(Travel(rotations[0], sharded, layout, self._number))

    def leave(self, rotation: Rotation) -> None:
        """Let one of the modules rotate by itself; a backward of earlier calls still works."""
        self._rotations.remove(rotation)
        if self._rotations:
            self._form()

    def run(self, rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The output of one of the modules, computed whole."""
        if rotation.sharded.replica_gradients is not None and torch.is_grad_enabled():
            rotation.sharded.replica_gradients.before_training(
                path_of(rotation.module), in_bundle=True
            )
        dtype, cuts = rotation.policy.compute_dtype, rotation.layout.cuts
        for parameter, cut in zip(rotation.sharded.parameters, cuts, strict=True):
            present = parameter_at(rotation.module, cut.name)
            rotation.sharded.require_here(present, cut.name)
            if present is not parameter:
                raise RotationError(
                    f"{path_of(rotation.module)} has another parameter {cut.name} than it was "
                    "rotated with, whose gradient would never be formed; write to the parameter "
                    "that is there (copy_, load_state_dict without assign)"
                )
        first = self._starts[rotation.sharded]
        whole = self._whole.parameters(rotation.module)[first : first + len(cuts)]
        weights = {cut.name: tensor for cut, tensor in zip(cuts, whole, strict=True)}
        others = {
            name: cast(local_of(parameter_at(rotation.module, name)), dtype)
            for name in rotation.replicated
        }
        outer_dtype = _outer_dtype(rotation, args, kwargs)
        if dtype is not None:
            args, kwargs = tree_map_only(Tensor, partial(cast, dtype=dtype), (args, kwargs))
        bounds = {cut.name: (0, cut.shape[cut.dim]) for cut in cuts}
        saving = self._whole.saving(rotation.module) if torch.is_grad_enabled() else nullcontext()
        name = span(f"{path_of(rotation.module)} forward: whole, in a bundle")
        with swapped(rotation.module, weights | others), saving, name:
            current = ModuleSlice(
                rotation.module, rotation.forward, weights, bounds, DeferredGrads({}), 1, cuts
            )
            output = rotation.rule.run(current, *args, **kwargs)
        return tree_map_only(Tensor, partial(cast, dtype=outer_dtype), output)


def _outer_dtype(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype:
    """The dtype of the outputs, as where the module rotates by itself."""
    first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    own = rotation.sharded.flat.dtype
    if first is not None and first.is_floating_point():
        own = first.dtype
    return rotation.policy.outer_dtype or own
