"""A module whose forward runs slice by slice."""

from collections.abc import Set
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar, Self, cast
from weakref import WeakValueDictionary

from torch import nn
from torch._compile import _disable_dynamo

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.backward.dropout_masks import MASKS_ARGUMENT, DropoutMasks, new_key
from gyre_trainer.rotation.backward.slice_dropout import may_drop_out
from gyre_trainer.rotation.guard import MIXED, Guard, own_class
from gyre_trainer.rotation.ring_pass import run
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.rotation.rule import Rule
from gyre_trainer.rotation.sharded_module import ShardedModule, copy_shards

# Of a function that `torch.compile` must run as it is: hops, and all that decides about them. This
# one imports the compiler at the first call; that of `torch.compiler` would import it here.
uncompiled = _disable_dynamo

_MIXED_CLASSES: WeakValueDictionary[tuple[type, type], type] = WeakValueDictionary()


class RotatedModule(ShardedModule):
    """Mixed in before a module's class: the module's forward goes round the ring.

    Attributes:
        rotation: how the module is cut, and where its parameters are.
        unchecked_modes: the values of `training` with which the module is still to be checked, at
            its first call.
        is_unverified: whether it is too large to be compared with the whole module by default.
        rotates_whole: whether it goes round the ring itself, and not only a part of what it calls.
        num_hooks: how many hooks modules inside had when it was rotated.
        guard: what its rule depends on and code may switch later.
    """

    rotates_whole: ClassVar[bool] = True
    rotation: Rotation
    unchecked_modes: Set[bool] = frozenset()
    is_unverified: bool = False
    num_hooks: int = 0
    guard: Guard
    training: bool
    _by_rule: dict[Rule, Rotation]

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for this rank's part of the batch, as without rotation."""
        return self.ring_forward(*args, **kwargs)

    @uncompiled
    def ring_forward(self, *args: Any, **kwargs: Any) -> Any:
        """One pass round the ring."""
        self.guard.require_same()
        self._require_no_more_hooks()
        self.add_dropout_masks(kwargs)
        return run(self.rotation, args, kwargs)

    def add_dropout_masks(self, kwargs: dict[str, Any]) -> None:
        """Add the masks of a new call to its arguments, where slices drop out.

        Raises:
            RotationError: the module drops out since it was rotated, and its rule does not.
        """
        if not may_drop_out(self.rotation.module):
            return
        self.rotation.rule.require_known_dropout(self.rotation.module)
        if self.rotation.rule.uses_dropout:
            equal = self.rotation.policy.dropout == "equal"
            kwargs[MASKS_ARGUMENT] = DropoutMasks(
                new_key(), self.rotation.sharded.ring, equal=equal
            )

    def _require_no_more_hooks(self) -> None:
        """Refuse hooks inside that the rule was not checked with.

        Raises:
            RotationError: there are more than when the module was rotated.
        """
        rotation = self.rotation
        if rotation.rule.linear_in and num_hooks(rotation.module, rotation.rule) > self.num_hooks:
            raise RotationError(
                f"a hook was registered inside of {own_class(rotation.module).__name__} after it "
                "was rotated as a whole: it would be called for each slice, with a part of what "
                "the module computes. Register it on the module itself, or let the layers inside "
                "rotate one by one (find_blocks=False, and no rule for the module)."
            )

    def rotation_by(self, rule: Rule) -> Rotation:
        """The same sharded parameters under another rule; equal rules give the same object."""
        if rule not in self._by_rule:
            self._by_rule[rule] = replace(self.rotation, rule=rule)
        return self._by_rule[rule]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A module with a copy of this rank's slice, which rotates by itself on the same ring."""
        rotation = self.rotation
        copy_shards(list(rotation.module.parameters()), memo)
        copied: Any = self._copy(memo, "rotation", "_by_rule", "guard")
        core = deepcopy(self.guard.module, memo)
        copied.guard = Guard.of(core, self.guard.name, drops_out=self.guard.drops_out)
        copied.rotation = replace(
            rotation,
            module=copied,
            forward=deepcopy(rotation.forward, memo),
            sharded=memo[id(rotation.sharded)],
            number=rotation.sharded.ring.modules.add(copied),
        )
        copied._by_rule = {}
        return cast("Self", copied)


def num_hooks_of(module: nn.Module) -> int:
    """How many hooks of other code a module has."""
    return sum(
        not getattr(hook, "__module__", "").startswith("gyre_trainer.")
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        for hook in hooks.values()
    )


def num_hooks_inside(module: nn.Module) -> int:
    """How many hooks of others modules inside have, which would get what slices compute."""
    return sum(num_hooks_of(each) for each in module.modules() if each is not module)


def num_hooks(module: nn.Module, rule: Rule) -> int:
    """How many hooks would get what slices of a module compute, or what no slice has.

    Those are hooks on modules inside. On the core of a split block, and on its last layer, those on
    gradients are: what goes from one to the other never exists.
    """
    core = module.get_submodule(rule.core)
    found = num_hooks_inside(core)
    if rule.core:
        last = module.get_submodule(rule.linear_in[0].rpartition(".")[0])
        found += sum(len(each._backward_hooks) for each in (core, last))
        found += sum(len(each._backward_pre_hooks) for each in (core, last))
    return found


def mix_in(module: nn.Module, behaviour: type, prefix: str) -> None:
    """Replace the module's class by a subclass of it with ``behaviour`` before it.

    The module stays an instance of its own class. Modules of one class share the subclass, so that
    they share compiled graphs, too. One that has the behaviour is left as it is.
    """
    cls = type(module)
    if issubclass(cls, behaviour):
        return
    mixed = _MIXED_CLASSES.get((behaviour, cls))
    if mixed is None:
        mixed = type(f"{prefix}{cls.__name__}", (behaviour, cls), {MIXED: True})
        _MIXED_CLASSES[behaviour, cls] = mixed
    module.__class__ = mixed


def behaviours_of(module: nn.Module) -> list[type]:
    """What was mixed in before the module's class, the last one first."""
    return [cls.__bases__[0] for cls in type(module).__mro__ if MIXED in vars(cls)]
