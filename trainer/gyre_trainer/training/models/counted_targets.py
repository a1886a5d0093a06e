# ruff: noqa: N803, N806  # names carry shape letters
"""The loss of those targets that count, for which alone a head computes.

Of conversations, the answers count; of packed and padded rows, what is no padding. Targets without
a weight have neither a loss nor a gradient, so leaving them out changes nothing but the order of
additions.

Dims: B batch, T time, D features, K targets.
"""

from typing import Any

import torch
from torch import Tensor, nn

from gyre_trainer.rotate import linear_cross_entropy

# A head is given a multiple of a sixteenth of the batch's targets. Steps then differ in few shapes,
# which an allocator can reuse. Finer parts spare at most a sixteenth of the head's work.
_NUM_PARTS = 16


def weighted_cross_entropy(
    head: nn.Linear, x_BTD: Tensor, targets_BT: Tensor, weights_BT: Tensor, **transform: Any
) -> Tensor:
    """The weighted mean cross-entropy, in nats: a scalar. The logits never exist as a whole.

    Args:
        head: rotated or not; ranks may differ in how many targets count.
        x_BTD: its input.
        targets_BT: integers in [0, V).
        weights_BT: of each target, such as a mask of 0 and 1; not all are 0.
        transform: `scale` and `soft_cap` of the logits, as `linear_cross_entropy` takes them.
    """
    x_KD, targets_K, weights_K = x_BTD.flatten(0, -2), targets_BT.flatten(), weights_BT.flatten()
    places_K = places_of_counted(weights_K)
    if len(places_K) < len(weights_K):
        x_KD, targets_K, weights_K = (
            each.index_select(0, places_K) for each in (x_KD, targets_K, weights_K)
        )
    losses_K = linear_cross_entropy(head, x_KD, targets_K, reduction="none", **transform)
    weights_K = weights_K.to(losses_K.dtype)
    return (losses_K * weights_K).sum() / weights_K.sum()


def places_of_counted(weights_T: Tensor) -> Tensor:
    """Where targets have a weight, int64 [K], and some places where they have none.

    K is a multiple of a sixteenth of all targets, rounded up, or their number.
    """
    counts = weights_T != 0
    part = -(-len(counts) // _NUM_PARTS)
    num_parts = max(1, -(-int(counts.sum()) // part))
    places: Tensor = counts.to(torch.uint8).argsort(descending=True, stable=True)
    return places[: num_parts * part]
