"""The identity of a hop: neighbours compare it, so that a slice is never taken for another one.

Two ranks that call different modules of one shape would exchange weights without an error, and
compute with the wrong ones.
"""

from collections.abc import Iterable
from typing import NamedTuple
from weakref import ref
from zlib import crc32

from torch import nn

from gyre_trainer.comm.spans import path_of

# Bits of each part of a packed identity; what does not fit wraps round. 2^20 modules are more than
# any model has, and two passes of one module differ by their direction and stream.
_STEP_BITS, _ROUND_BITS, _NUMBER_BITS, _TRAINED_BITS = 14, 6, 20, 16


class HopIdentity(NamedTuple):
    """The identity of one hop.

    Attributes:
        number: the module's number in `Modules`, the same on every rank.
        forward: whether the module's forward goes on, not its backward.
        gradients: whether gradients travel, not weights.
        round_: the round of the ring pass.
        step: the hop's number in its round, from 1.
        trained: of which of the module's parameters gradients travel, as `digest_of_names` gives
            it; 0 for weights.
    """

    number: int
    forward: bool
    gradients: bool
    round_: int
    step: int
    trained: int = 0

    def pack(self) -> int:
        """A number in [1, 2^59); other hops, and those of other modules, have other numbers."""
        packed: int = self.trained % 2**_TRAINED_BITS
        packed = packed << _NUMBER_BITS | self.number % 2**_NUMBER_BITS
        packed = packed << _ROUND_BITS | self.round_ % 2**_ROUND_BITS
        packed = packed << _STEP_BITS | self.step % 2**_STEP_BITS
        flags = self.forward << 1 | self.gradients
        return (packed << 2 | flags) + 1

    @classmethod
    def unpack(cls, packed: int) -> "HopIdentity":
        """The hop of a number that `pack` gave."""
        rest, flags = divmod(packed - 1, 4)
        rest, step = divmod(rest, 2**_STEP_BITS)
        rest, round_ = divmod(rest, 2**_ROUND_BITS)
        trained, number = divmod(rest, 2**_NUMBER_BITS)
        return cls(number, bool(flags & 2), bool(flags & 1), round_, step, trained)


def digest_of_names(names: Iterable[str]) -> int:
    """A number in [0, 2^16) that differs for nearly all other names."""
    return crc32("\n".join(names).encode()) % (1 << _TRAINED_BITS)


def differ_in_trained(one: int, other: int) -> bool:
    """Whether two packed identities are of one hop, but of gradients of other parameters."""
    if not (one and other):
        return False
    hops = HopIdentity.unpack(one), HopIdentity.unpack(other)
    return one != other and len({hop._replace(trained=0) for hop in hops}) == 1


class Modules:
    """The modules that rotate on one ring, by numbers that are the same on every rank.

    The ranks rotate the same modules in the same order, so they count alike.

    Attributes:
        count: the number that the next module gets.
    """

    def __init__(self) -> None:
        self.count = 0
        self._modules: dict[int, ref[nn.Module]] = {}

    def add(self, module: nn.Module) -> int:
        """The number of a new module."""
        number, self.count = self.count, self.count + 1
        self._modules[number] = ref(module)
        return number

    def skip_to(self, number: int) -> None:
        """Give the next module this number."""
        self.count = number

    def describe(self, packed: int) -> str:
        """Names the module and the part of its pass, such as "blocks.0.mlp (forward, step 1)"."""
        if not packed:
            return "something that is no module"
        hop = HopIdentity.unpack(packed)
        what = "forward" if hop.forward else "backward, gradients" if hop.gradients else "backward"
        part = f"{what}, step {hop.step} of round {hop.round_}"
        return f"{self._name(hop.number)} ({part})"

    def difference(self, rank: int, identity: int, other: int, theirs: int) -> str:
        """Says which modules two ranks call."""
        return (
            f"rank {rank} calls {self.describe(identity)}, "
            f"but rank {other} calls {self.describe(theirs)}; "
            "all ranks must call the same modules in the same order, also to evaluate: call the "
            "model on all ranks, or use gyre-train eval"
        )

    def _name(self, number: int) -> str:
        known = self._modules.get(number)
        module = None if known is None else known()
        return f"module {number}" if module is None else path_of(module)
