"""Hooks on accumulated gradients that wait until these gradients are averaged.

Torch calls a hook of `register_post_accumulate_grad_hook` when the gradient of this rank is there.
One that takes the optimizer's step would step each rank by its own gradient, and the ranks would
train different models. So such hooks are held, and called when the mean is there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor


class HeldHook:
    """Stands in the place of a hook; when torch calls it, it only notes that.

    Attributes:
        hook: the hook.
        was_called: whether torch has called it since `call_held`.
    """

    def __init__(self, hook: Callable[[Tensor], None]) -> None:
        self.hook = hook
        self.was_called = False

    def __call__(self, _parameter: Tensor) -> None:
        """Note that there is a gradient."""
        self.was_called = True


def hold_hooks(parameter: Tensor, own: Callable[..., None]) -> None:
    """Hold all hooks on the accumulated gradient but those that are a `partial` of ``own``."""
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    if len(hooks) < 2:
        return
    for key, hook in hooks.items():
        is_own = isinstance(hook, partial) and hook.func is own
        if not is_own and not isinstance(hook, HeldHook):
            hooks[key] = HeldHook(hook)  # torch reads the dict; a handle removes by the key


def call_held(parameter: Tensor, *, is_new: bool = False) -> None:
    """Call the held hooks that torch has called, now that the gradient is the mean.

    Args:
        parameter: with a gradient.
        is_new: whether other ranks alone had a gradient, so that torch has called none here.
    """
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    for hook in list(hooks.values()):
        if isinstance(hook, HeldHook) and (hook.was_called or is_new):
            hook.was_called = False
            hook.hook(parameter)
