"""What a rule depends on and code may switch later; it is compared at each call of a module."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from gyre_trainer.errors import RotationError

_KERNELS = {"attention kernel": "_attn_implementation", "experts kernel": "_experts_implementation"}
MIXED = "_mixed_in"  # marks classes that `mix_in` made


def own_class(module: nn.Module) -> type:
    """The module's class before anything was mixed in."""
    return next(
        cls for cls in type(module).__mro__ if issubclass(cls, nn.Module) and MIXED not in vars(cls)
    )


def sets_forward(module: nn.Module) -> bool:
    """Whether an instance has another forward than its class.

    Libraries that wrap forwards for one call leave the class's own on the instance; it is removed.
    """
    forward: Any = vars(module).get("forward")
    if forward is None:
        return False
    own: Any = own_class(module)
    if getattr(forward, "__self__", None) is module and forward.__func__ is own.forward:
        del vars(module)["forward"]
        return False
    return True


def kernels_of(module: nn.Module) -> dict[str, Any]:
    """The kernels that a module's configuration chooses; those of a core are its own."""
    config = getattr(module, "config", None)
    return {
        name: value
        for name, key in _KERNELS.items()
        if (value := getattr(config, key, None)) is not None
    }


def drop_rates(module: nn.Module) -> dict[str, float]:
    """The rates of dropout among a module's own attributes, as for functions of torch."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, float) and "drop" in name
    }


@dataclass(slots=True)
class Guard:
    """The state of a module when it was rotated.

    Attributes:
        module: the module whose forward runs with slices: the rotated one, or the core of a block.
        name: of the rotated module's class.
        cls: the module's class.
        fields: what is compared, by names for messages.
        glance: what is looked at first, as fast as it may be.
        drops_out: whether the rule knows of dropout.
    """

    module: nn.Module
    name: str
    cls: type
    fields: dict[str, Any]
    glance: list[Any]
    drops_out: bool

    @classmethod
    def of(cls, module: nn.Module, name: str, *, drops_out: bool) -> "Guard":
        """The guard of a module that is rotated now."""
        own = own_class(module)
        fields = dict(_fields(module, own, drops_out=drops_out))
        return cls(module, name, own, fields, list(_glance(module, own)), drops_out)

    def require_same(self) -> None:
        """Return if nothing was switched that the rule depends on.

        Raises:
            RotationError: names what was, and what it is now.
        """
        now = list(_glance(self.module, self.cls))
        if now == self.glance:
            return
        fields = dict(_fields(self.module, self.cls, drops_out=self.drops_out))
        for name in {**self.fields, **fields}:
            before, after = self.fields.get(name), fields.get(name)
            if before != after:
                raise RotationError(
                    f"{self.name}: {name} was {_told(before)} when it was rotated as one, and is "
                    f"{_told(after)} now. Set it before rotate_all, or let its layers rotate one "
                    "by one (find_blocks=False, and no rule for the module)"
                )
        self.glance = now


def _glance(module: nn.Module, cls: Any) -> Iterator[Any]:
    config = getattr(module, "config", None)
    yield cls.forward
    for key in _KERNELS.values():
        yield getattr(config, key, None)
    for name, value in vars(module).items():
        if name != "forward" and (callable(value) or isinstance(value, float)):
            yield name, value
    for each in module.modules():
        yield type(each), each is not module and vars(each).get("forward")


def _fields(module: nn.Module, cls: Any, *, drops_out: bool) -> Iterator[tuple[str, Any]]:
    yield "the forward of its class", cls.forward
    for name, value in kernels_of(module).items():
        yield f"its {name}", value
    for name, value in vars(module).items():
        if callable(value) and name != "forward" and not name.startswith("_"):
            yield f"its {name}", value
    for name, each in module.named_modules():
        if not name:
            continue
        yield f"the class of {name}", own_class(each)
        if sets_forward(each):
            yield f"the forward of {name}", vars(each)["forward"]
    if not drops_out:
        for name, rate in drop_rates(module).items():
            if rate > 0:
                yield f"its {name}", rate


def _told(value: Any) -> str:
    if value is None:
        return "not set"
    return getattr(value, "__qualname__", None) or repr(value)
