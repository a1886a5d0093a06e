# ruff: noqa: N803, N806  # names carry shape letters
"""The loss of a language model, without the logits of all tokens.

Of conversations, the answers count; of packed rows, what is no padding. Targets without a weight
have neither a loss nor a gradient, so a head computes for the others alone.

Dims: B batch, T time, D features, V vocabulary, K targets that count.
"""

import logging
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gyre_trainer.layers.causal_loss import LibraryModel
from gyre_trainer.rotate import linear_cross_entropy
from gyre_trainer.rotation.rotated_module import own_class

_log = logging.getLogger(__name__)

# A head is given a multiple of a sixteenth of the batch's targets. Steps then differ in few shapes,
# which an allocator can reuse. Finer parts spare at most a sixteenth of the head's work.
_NUM_PARTS = 16


def weighted_cross_entropy(
    head: nn.Linear,
    x_BTD: Tensor,
    targets_BT: Tensor,
    weights_BT: Tensor | None,
    **transform: Any,
) -> Tensor:
    """The weighted mean cross-entropy, in nats: a scalar. The logits never exist as a whole.

    Args:
        head: rotated or not; ranks may differ in how many targets count.
        x_BTD: its input.
        targets_BT: integers in [0, V).
        weights_BT: of each target, such as a mask of 0 and 1; not all are 0. They are counted, so
            in the host's memory nothing waits for a device. None for equal weights.
        transform: `scale` and `soft_cap` of the logits, as `linear_cross_entropy` takes them.
    """
    if weights_BT is None:
        return linear_cross_entropy(head, x_BTD, targets_BT, **transform)
    x_KD, targets_K, weights_K = x_BTD.flatten(0, -2), targets_BT.flatten(), weights_BT.flatten()
    places_K = places_of_counted(weights_K)
    if len(places_K) < len(weights_K):
        weights_K = weights_K.index_select(0, places_K)
        places_K = moved(places_K, x_KD.device)
        x_KD, targets_K = (each.index_select(0, places_K) for each in (x_KD, targets_K))
    losses_K = linear_cross_entropy(head, x_KD, targets_K, reduction="none", **transform)
    weights_K = moved(weights_K, x_KD.device).to(losses_K.dtype)
    return (losses_K * weights_K).sum() / weights_K.sum()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A copy to CUDA is queued, and nothing waits for it."""
    if tensor.device.type == device.type:
        return tensor
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def places_of_counted(weights_T: Tensor) -> Tensor:
    """Where targets have a weight, int64 [K], and some places where they have none.

    K is a multiple of a sixteenth of all targets, rounded up, or their number.
    """
    counts = weights_T != 0
    part = -(-len(counts) // _NUM_PARTS)
    num_parts = max(1, -(-int(counts.sum()) // part))
    places: Tensor = counts.to(torch.uint8).argsort(descending=True, stable=True)
    return places[: num_parts * part]


class Loss(Protocol):
    """The mean cross-entropy of a model on this rank's tokens."""

    def __call__(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        """As `GPT.loss`; whether tokens see other documents of their row is up to the model."""
        ...


class LibraryLoss:
    """The loss of a language model of `transformers`, by slices of the vocabulary.

    The router's loss is in it, where the configuration sets `output_router_logits`. See [Note: The
    head computes the loss] in `gyre_trainer.layers.causal_loss`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._library = LibraryModel(model)
        self._model = model
        self._apart: dict[int, bool] = {}

    def __call__(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        """As `GPT.loss`; packed documents do not see each other where the model can do that."""
        if positions_BT is not None and not self.keeps_apart(len(tokens_BT)):
            positions_BT = None
        compute = partial(weighted_cross_entropy, targets_BT=targets_BT, weights_BT=weights_BT)
        return self._library.loss(self._inputs(tokens_BT, positions_BT), compute)

    def _inputs(self, tokens_BT: Tensor, positions_BT: Tensor | None) -> dict[str, Any]:
        """The model's inputs.

        A mask says which tokens are there, even if all are. Without one, transformers looks for
        packed sequences, and gives attention a mask of [T, T] instead of `is_causal`; then every
        slice of attention keeps a float copy.
        """
        more: dict[str, Any] = {"input_ids": tokens_BT}
        if positions_BT is not None:
            more["position_ids"] = positions_BT
        elif "attention_mask" in self._library.arguments:
            more["attention_mask"] = torch.ones_like(tokens_BT)
        if "use_cache" in self._library.arguments:
            more["use_cache"] = False
        return more

    def keeps_apart(self, num_rows: int) -> bool:
        """Whether positions that begin again keep documents apart, in a batch of rows. Collective.

        The first call tries it, and the log says where they do not. One row or several make a
        difference: transformers gives positions to flash kernels for one row alone.
        """
        num_rows = min(num_rows, 2)
        if num_rows not in self._apart:
            self._apart[num_rows] = self._try_apart(num_rows)
        return self._apart[num_rows]

    @torch.no_grad()
    def _try_apart(self, num_rows: int) -> bool:
        apart = "position_ids" in self._library.arguments
        if apart:
            was_training, device = self._model.training, next(self._model.parameters()).device
            positions_BT = torch.arange(4, device=device).repeat(num_rows, 2)
            first, other = (
                torch.tensor([[*before, 0, 1, 0, 1]] * num_rows, device=device)
                for before in ((0, 0, 0, 0), (1, 1, 1, 1))
            )
            self._model.eval()
            one, two = (
                self._model(**self._inputs(each, positions_BT)).logits[:, 4:]
                for each in (first, other)
            )
            self._model.train(was_training)
            apart = torch.allclose(one, two, rtol=1e-3, atol=1e-4 * float(one.abs().max()))
        if not apart:
            _log.warning(
                "%s does not keep packed documents apart: tokens see those of earlier documents",
                own_class(self._model).__name__,
            )
        return apart
