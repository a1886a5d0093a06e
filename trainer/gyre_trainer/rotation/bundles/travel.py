"""How the slices of a bundle reach every rank, and their gradients their owners."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from gyre_trainer.comm.identity import HopIdentity
from gyre_trainer.comm.ring import Direction, Ring
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.bundles.gradient_agreement import require_agreement
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.shards.gradient_ring import GradientRing
from gyre_trainer.shards.layout import Cut, Layout
from gyre_trainer.shards.remote_slices import RemoteSlices
from gyre_trainer.shards.sharded_parameters import ShardedParameters


class _Row(Layout):
    """A layout in which a slice is one tensor."""

    def views(self, flat: Tensor, index: int) -> list[Tensor]:
        """All of slice ``index``."""
        return [flat]


@dataclass(frozen=True, eq=False)
class Travel:
    """How the slices of several sharded parameters travel together, and their gradients.

    Attributes:
        rotation: of the first module; all others have the same policy.
        sharded: the parameters of all modules, each once.
        layout: the slices' layout: the parameters of ``sharded``, one after the other.
        number: the bundle's number in `Ring.modules`.
    """

    rotation: Rotation
    sharded: list[ShardedParameters]
    layout: Layout
    number: int

    @property
    def ring(self) -> Ring:
        """The ring that they travel on."""
        return self.rotation.sharded.ring

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(map(self.layout.numel, range(self.ring.size)))

    @property
    def version(self) -> int:
        """A number that grows with every write to a parameter."""
        return sum(each.version + each.flat._version for each in self.sharded)

    def require_version(self, version: int) -> None:
        """Require that no parameter was written to since ``version``.

        Raises:
            RotationError: one was.
        """
        if self.version != version:
            raise RotationError(
                f"parameters of {self.rotation.name}, or of a module in one bundle with it, "
                "changed between forward and backward"
            )

    @torch.no_grad()
    @torch.inference_mode(mode=False)
    def gather(self, caller: nn.Module, *, forward: bool) -> list[Tensor]:
        """The whole parameters, in the dtype to compute in. Collective.

        Args:
            caller: the module that needs them.
            forward: whether it is for the modules' forward. Both go clockwise, because a hop for
                the next module in backward may be in flight the other way.
        """
        ring, layout = self.ring, self.layout
        dtypes = {each.flat.dtype for each in self.sharded}
        if len(dtypes) > 1:
            raise RotationError(
                f"{self.rotation.name} travels in one bundle with modules of another dtype "
                f"({', '.join(sorted(map(str, dtypes)))}); convert the whole model"
            )
        own = torch.cat([each.flat for each in self.sharded])
        own = cast(own, self.rotation.policy.compute_dtype)
        slices = {ring.rank: layout.views(own, ring.rank)}
        ring.modules.note_caller(self.number, caller)
        hop = HopIdentity(self.number, forward, False, 0, 1)
        with closing(RemoteSlices(ring, own, layout, Direction.CLOCKWISE, hop)) as remote:
            for index, flat in remote:
                slices[index] = layout.views(flat.clone(), index)
        shards = zip(*(slices[index] for index in range(ring.size)), strict=True)
        return [torch.cat(each, cut.dim) for cut, each in zip(layout.cuts, shards, strict=True)]

    def reduce(
        self, grads: Sequence[Tensor | None], trainable: Sequence[bool]
    ) -> list[Tensor | None]:
        """The own shards' gradients, averaged over the ranks; None where no rank has one.

        On CUDA a rank without one, where others have it, has zeros.

        Raises:
            RotationError: on a CPU, some ranks have a gradient that others have not.
        """
        ring, flat = self.ring, self.rotation.sharded.flat
        layout, present = self.layout.only(trainable), [grad is not None for grad in grads]
        present = [each for each, wanted in zip(present, trainable, strict=True) if wanted]
        some = next(grad for grad in grads if grad is not None)
        wanted = (grad for grad, wanted in zip(grads, trainable, strict=True) if wanted)
        pieces = [
            torch.split(
                some.new_zeros(cut.shape) if grad is None else grad,
                [stop - start for start, stop in layout.all_bounds(cut)],
                cut.dim,
            )
            for cut, grad in zip(layout.cuts, wanted, strict=True)
        ]
        shares = Cut("shares", (len(present) * ring.size,), 0)
        rows = _Row((*layout.cuts, shares), ring.size)
        dtype = self.rotation.policy.grad_dtype or flat.dtype
        gradient_ring = GradientRing(ring, rows, dtype, flat.device, self.number)
        used = some.new_tensor(present)
        for step in range(1, ring.size + 1):
            index = (ring.rank + step) % ring.size
            row = torch.cat([*(each[index].reshape(-1) for each in pieces), used])
            gradient_ring.receive(index).add(0, row)
            gradient_ring.send_on()
        own = gradient_ring.finish().to(flat.dtype)
        if not isinstance(own, FakeTensor) and (flat.device.type == "cpu" or not all(present)):
            # on CUDA the process waits for the device, so only where a gradient is missing here
            found_shares = own[layout.numel(ring.rank) :].tolist()
            if flat.device.type == "cpu":
                names = [cut.name.partition(": ")[2] for cut in layout.cuts]
                require_agreement(names, found_shares, present, ring)
            present = [share > 0 for share in found_shares]
        found = zip(layout.views(own[: layout.numel(ring.rank)], ring.rank), present, strict=True)
        own_grads = iter([grad if there else None for grad, there in found])
        return [next(own_grads) if wanted else None for wanted in trainable]
