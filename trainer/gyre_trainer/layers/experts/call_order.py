"""Which modules follow the experts of a list in the forward of the module that has them.

[Note: Ranks without tokens for any expert]

A rank whose tokens choose no expert calls them all with no tokens, before the next module that
rotates, if that one follows the experts, as shared experts do. It must not do so before a router,
or its ranks would call different modules. Only a rank that calls an expert sees which of them it
is. So in the first forward all ranks tell each other what they call: each time that one would call
its first expert, another module that rotates, or nothing more. All do that equally often, because
they call the modules before the experts alike. Once a rank has called an expert, a module that
other ranks would call instead follows it.
"""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.comm.mesh import ring_group
from gyre_trainer.comm.ring_registry import ring_of


class CallOrder:
    """Which of some modules follow a list of experts; collective until a rank calls an expert."""

    def __init__(self, mesh: DeviceMesh, num_others: int) -> None:
        """``num_others`` other modules rotate."""
        self._mesh = mesh
        self._num_others = num_others
        self._is_known = not num_others
        self._following: set[int] = set()

    def copy(self) -> "CallOrder":
        """The order of a copied module, which is not known yet."""
        return CallOrder(self._mesh, self._num_others)

    def expert_comes(self) -> None:
        """The first expert in a forward is called now."""
        self._tell(self._num_others)

    def forward_ends(self) -> None:
        """No expert was called in a forward."""
        self._tell(self._num_others + 1)

    def follows(self, number: int, *, after_expert: bool) -> bool:
        """Whether the module ``number``, which is called now, follows the experts.

        ``after_expert`` is whether this rank has called an expert in this forward.
        """
        if after_expert:
            self._following.add(number)
        else:
            self._tell(number)
        return number in self._following

    def _tell(self, number: int) -> None:
        if self._is_known:
            return
        called = torch.zeros(self._num_others + 2, device=self._mesh.device_type)
        called[number] = 1
        if isinstance(called, FakeTensor):
            self._is_known = True
            return
        with ring_of(self._mesh).hang_diagnosis.collective("comparing what is called of experts"):
            dist.all_reduce(called, dist.ReduceOp.MAX, group=ring_group(self._mesh))
        *others, expert, _ = called.gt(0).tolist()
        if expert:
            self._is_known = True
            self._following |= {place for place, there in enumerate(others) if there}
