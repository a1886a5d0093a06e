"""Muon on the shards of a rotated model: each matrix is orthogonalised once, on one rank.

Muon's update is the running mean of a matrix's gradients, made orthogonal, and that needs the
matrix whole. In each round every rank gets one matrix: an all-to-all brings it the other ranks'
shards, and after its computation another one brings every rank its shard of each result. Both carry
bfloat16, in which torch computes, too.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from gyre_trainer.comm.ring import collective
from gyre_trainer.optimizers.shard import OwnShard, loss_of, own_shard_of
from gyre_trainer.shards.layout import local_of, slice_bounds

_DTYPE = torch.bfloat16  # in which torch's Muon orthogonalises


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for rotated models: no rank orthogonalises what another one does.

    It takes the same arguments. Given equal gradients, it leaves the same bits as torch's does in
    one process. (Torch's own takes rotated models, too, but there every rank computes with every
    matrix, and adds up sums of bfloat16 in another order.) A rank holds one whole matrix at a time,
    in bfloat16, and up to four times its bytes while torch orthogonalises it. All ranks together
    send 4 (N-1)/N bytes for each entry of a matrix. Matrices that every rank has whole, such as a
    router's, are orthogonalised by every rank.

    Give it the matrices inside blocks, and the embedding, the head and all vectors to another
    optimizer.

    Raises:
        ValueError: a parameter is no matrix.
        RotationError: at a step: a parameter is cut along more than one axis of its mesh.
        RingError: at a step: a rank is gone or too late.

    Example:
        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not each for each in matrices)]
        optimizers = [Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)]
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. All ranks must have gradients of the same parameters.

        Args:
            closure: computes the loss and its gradients again; its result is returned.
        """
        loss = loss_of(closure)
        shared: defaultdict[dist.ProcessGroup, list[_Matrix]] = defaultdict(list)
        for options in self.param_groups:
            for parameter in options["params"]:
                if parameter.grad is None:
                    continue
                matrix = self._matrix(parameter, options)
                if matrix.shard.group is None:
                    matrix.apply(matrix.orthogonalised(matrix.update()))
                else:
                    shared[matrix.shard.group].append(matrix)
        for group, matrices in shared.items():
            # the ranks wait for each other, so matrices of one round are about as large
            matrices.sort(key=lambda each: -each.whole.numel())
            num_ranks = dist.get_world_size(group)
            for start in range(0, len(matrices), num_ranks):
                together = matrices[start : start + num_ranks]
                _step_together([*together, *[None] * (num_ranks - len(together))], group)
        return loss

    def _matrix(self, parameter: Tensor, options: dict[str, Any]) -> "_Matrix":
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        mean, gradient = local_of(state["momentum_buffer"]), local_of(parameter.grad)
        return _Matrix(parameter, own_shard_of(parameter), mean, gradient, options)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix in one step.

    Attributes:
        whole: the parameter.
        shard: how it is cut.
        mean: this rank's shard of the running mean of gradients.
        gradient: this rank's shard of the gradient.
        options: those of its group.
    """

    whole: Tensor
    shard: OwnShard
    mean: Tensor
    gradient: Tensor
    options: dict[str, Any]

    def shape_on(self, rank: int, num_ranks: int) -> list[int]:
        """The shape of a rank's shard."""
        assert self.shard.dim is not None
        shape = list(self.whole.shape)
        start, stop = slice_bounds(shape[self.shard.dim], rank, num_ranks)
        shape[self.shard.dim] = stop - start
        return shape

    def update(self) -> Tensor:
        """This rank's shard of what is made orthogonal, in memory of its own."""
        momentum = self.options["momentum"]
        self.mean.lerp_(self.gradient, 1 - momentum)
        update = self.gradient.lerp(self.mean, momentum) if self.options["nesterov"] else self.mean
        return update.to(_DTYPE, copy=True)

    def orthogonalised(self, update: Tensor) -> Tensor:
        """The whole matrix ``update``, made orthogonal as torch's Muon does."""
        result: Tensor = _zeropower_via_newtonschulz(
            update,
            self.options["ns_coefficients"],
            self.options["ns_steps"],
            self.options["eps"],
        )
        return result

    def apply(self, update: Tensor) -> None:
        """Change this rank's shard by its shard of the orthogonal matrix."""
        rate, local = self.options["lr"], local_of(self.whole)
        if isinstance(rate, Tensor):
            rate = rate.squeeze()  # in float32, as torch's Muon computes with it
        adjusted = _adjust_lr(rate, self.options["adjust_lr_fn"], self.whole.shape)
        local.mul_(1 - rate * self.options["weight_decay"])
        local.add_(update, alpha=-adjusted)
        torch.autograd.graph.increment_version(self.whole)  # `local` has another


def _step_together(matrices: Sequence[_Matrix | None], group: dist.ProcessGroup) -> None:
    """Step one matrix per rank: that at its rank's place is orthogonalised by that rank."""
    num_ranks, rank = len(matrices), dist.get_rank(group)
    own = matrices[rank]
    mine = [[0] if each is None else each.shape_on(rank, num_ranks) for each in matrices]
    of_own = [[0] if own is None else own.shape_on(other, num_ranks) for other in range(num_ranks)]
    device = next(each.gradient.device for each in matrices if each)
    nothing = torch.empty(0, device=device)
    parts = _exchanged([each.update() if each else nothing for each in matrices], of_own, group)
    if own is not None:
        dim = own.shard.dim
        assert dim is not None
        whole = torch.cat(parts, dim)
        parts.clear()  # the matrix is there, so its parts take no memory while it is orthogonalised
        whole = own.orthogonalised(whole)
        parts = list(torch.split(whole, [shape[dim] for shape in of_own], dim))
    for matrix, part in zip(matrices, _exchanged(parts, mine, group), strict=True):
        if matrix is not None:
            matrix.apply(part)


def _exchanged(
    parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> list[Tensor]:
    """What each rank has sent to this one, in ``shapes``. ``parts`` has one for each rank."""
    outgoing = torch.cat([part.to(_DTYPE).flatten() for part in parts])
    sizes = [prod(shape) for shape in shapes]
    incoming = outgoing.new_empty(sum(sizes))
    with collective("exchanging shards of matrices for Muon"):
        dist.all_to_all_single(
            incoming, outgoing, sizes, [part.numel() for part in parts], group=group
        )
    return [
        part.view(*shape) for part, shape in zip(torch.split(incoming, sizes), shapes, strict=True)
    ]
