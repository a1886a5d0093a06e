"""Add products of bfloat16 or float16 matrices in float32, on CUDA."""

import torch
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)
_IS_THERE = hasattr(torch.ops.aten.addmm, "dtype_out")


def takes_wide_product(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether torch adds this product to ``total`` without memory for it."""
    is_wide = total.dtype == torch.float32 and left.dtype == right.dtype and left.dtype in _HALVES
    return total.is_cuda and is_wide and _IS_THERE


def add_wide_product(
    total: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> None:
    """``total = beta * total + alpha * left @ right``; ``total`` is unread if ``beta`` is 0."""
    torch.addmm(total, left, right, out_dtype=torch.float32, beta=beta, alpha=alpha, out=total)
