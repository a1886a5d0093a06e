"""AdamW with a byte for each entry of its moments, on the shards of a rotated model.

Blocks of entries share a float32 scale, and a code names one of 256 levels between -1 and 1, more
of them near 0 (Dettmers et al., arXiv 2110.02861). Blocks run along an uncut dim, so no
block crosses a rank's border: steps are the same at every number of ranks that cut a matrix along
the same dim, and a checkpoint of one number loads at another. Attention by heads, whose key/value
heads the ranks share evenly, cuts other dims than its layers one by one.

The second moment is kept as its root. Its levels then reach as far down as those of the first
moment, and no update divides by a root that was rounded to 0.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gyre_trainer.optimizers.shard import KeepsSavedDtypes, loss_of, own_shard_of, shaped_like
from gyre_trainer.shards.layout import local_of

# Entries that share a scale: more make codes less exact, fewer take more than 1/64 of a byte each.
_BLOCK = 256
# Smaller parameters keep float32 moments: they take no memory worth saving.
_MIN_NUMEL = 4096
_MEAN, _ROOT = "exp_avg", "exp_avg_sq_root"


class AdamW8bit(KeepsSavedDtypes):
    """`torch.optim.AdamW` with moments of 8 bits, for rotated and for plain models.

    Vectors, and parameters of fewer than 4,096 elements, keep moments in float32. A step takes one
    parameter's moments to float32 at a time.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        """Take the arguments of AdamW."""
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: computes the loss and its gradients again; its result is returned.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in (_MEAN, _ROOT):
                state.update(_zeros(parameter, name))
        state["step"] += 1
        (beta1, beta2), num_steps, rate = group["betas"], float(state["step"]), float(group["lr"])
        gradient, local = local_of(parameter.grad), local_of(parameter)
        mean, root = (
            _decoded(state, name, parameter).to(gradient.dtype) for name in (_MEAN, _ROOT)
        )
        mean.lerp_(gradient, 1 - beta1)
        root.square_().lerp_(gradient.square(), 1 - beta2).sqrt_()
        _encode(state, _MEAN, parameter, mean)
        _encode(state, _ROOT, parameter, root)
        local.mul_(1 - rate * group["weight_decay"])
        root.div_((1 - beta2**num_steps) ** 0.5).add_(group["eps"])
        local.addcdiv_(mean, root, value=-rate / (1 - beta1**num_steps))
        torch.autograd.graph.increment_version(parameter)  # writes to `local` do not raise it


def _block_dim(parameter: Tensor) -> int | None:
    """The dim of the blocks, the largest uncut one; None for float32 moments."""
    dims = [dim for dim in range(parameter.ndim) if dim != own_shard_of(parameter).dim]
    if parameter.ndim < 2 or parameter.numel() < _MIN_NUMEL:
        return None
    return max(dims, key=lambda dim: parameter.shape[dim])


def _zeros(parameter: Tensor, name: str) -> dict[str, Tensor]:
    """A moment before the first step: codes and scales, or values."""
    dim = _block_dim(parameter)
    if dim is None:
        return {name: torch.zeros_like(parameter)}
    codes = torch.full_like(parameter, _levels(name == _MEAN).index(0.0), dtype=torch.uint8)
    num_blocks = -(-parameter.shape[dim] // _BLOCK)
    scales = shaped_like(parameter, dim, num_blocks, torch.float32)
    return {name: codes, f"{name}_scale": scales}


def _decoded(state: dict[str, Any], name: str, parameter: Tensor) -> Tensor:
    """This rank's part of a moment, in new memory."""
    dim, here = _block_dim(parameter), local_of(state[name])
    if dim is None:
        return here.clone()
    values = torch.tensor(_levels(name == _MEAN), device=here.device)[here.int()]
    return values.mul_(_spread(local_of(state[f"{name}_scale"]), dim, here.shape[dim]))


def _encode(state: dict[str, Any], name: str, parameter: Tensor, values: Tensor) -> None:
    """Keep this rank's part of a moment."""
    dim, here = _block_dim(parameter), local_of(state[name])
    if dim is None:
        here.copy_(values)
        return
    scales, values = local_of(state[f"{name}_scale"]), values.float()
    blocks = torch.split(values.abs(), _BLOCK, dim)
    torch.cat([each.amax(dim, keepdim=True) for each in blocks], dim, out=scales)
    levels = torch.tensor(_levels(name == _MEAN), device=values.device)
    middles = (levels[1:] + levels[:-1]) / 2
    # a block of zeros has the scale 0, and 0 / 0 would be no level
    shares = values / _spread(scales, dim, values.shape[dim]).clamp_(min=torch.finfo().tiny)
    here.copy_(torch.bucketize(shares, middles, out_int32=True))


def _spread(scales: Tensor, dim: int, length: int) -> Tensor:
    """Each block's scale, once for each of its entries."""
    return scales.repeat_interleave(_BLOCK, dim).narrow(dim, 0, length)


@functools.cache
def _levels(signed: bool) -> list[float]:
    """The 256 values of codes: linear within each of seven powers of ten."""
    found = [0.0, 1.0]
    for power in range(7):
        num = 2**power * (1 if signed else 2)
        middles = [(0.1 + 0.9 * (i + 0.5) / num) * 10.0 ** (power - 6) for i in range(num)]
        found += [*middles, *([-each for each in middles] if signed else [])]
    return sorted(found)
