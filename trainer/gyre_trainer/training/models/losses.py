# ruff: noqa: N803, N806  # names carry shape letters
"""The loss of a language model, without the logits of all tokens.

Dims: B batch, T time, D features, V vocabulary.
"""

import logging
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gyre_trainer.layers.causal_loss import LibraryModel
from gyre_trainer.rotate import linear_cross_entropy
from gyre_trainer.rotation.rotated_module import own_class
from gyre_trainer.training.models.counted_targets import weighted_cross_entropy
from gyre_trainer.training.models.gpt import GPT

_log = logging.getLogger(__name__)


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


def loss_of(model: nn.Module) -> Loss:
    """The loss of a GPT, or of a language model of `transformers`."""
    return model.loss if isinstance(model, GPT) else LibraryLoss(model)


class LibraryLoss:
    """The loss of a language model of `transformers`, by slices of the vocabulary.

    The router's loss is in it, where the configuration sets `output_router_logits`. See [Note: The
    head computes the loss] in `gyre_trainer.layers.causal_loss`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._library = LibraryModel(model)
        self._model = model
        taken = self._library.arguments
        self._takes_mask, self._takes_cache = "attention_mask" in taken, "use_cache" in taken

    def __call__(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        is_token_BT: Tensor | None = None,
        decoder_BT: Tensor | None = None,
    ) -> Tensor:
        """As `GPT.loss`; packed documents do not see each other where the model can do that.

        Args:
            tokens_BT: inputs of the model, of an encoder-decoder its encoder's: [B, S].
            targets_BT: its targets.
            weights_BT: of each target.
            positions_BT: of each token in its document.
            is_token_BT: false for padding, of the shape of ``tokens_BT``; None for none.
            decoder_BT: inputs of the decoder, if there is one.
        """
        if positions_BT is not None and not self.keeps_apart:
            positions_BT = None
        inputs = self._inputs(tokens_BT, positions_BT, is_token_BT, decoder_BT)

        def compute(head: nn.Linear, x_BTD: Tensor, **transform: Any) -> Tensor:
            if weights_BT is None:
                return linear_cross_entropy(head, x_BTD, targets_BT, **transform)
            return weighted_cross_entropy(head, x_BTD, targets_BT, weights_BT, **transform)

        return self._library.loss(inputs, compute)

    def _inputs(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None,
        is_token_BT: Tensor | None = None,
        decoder_BT: Tensor | None = None,
    ) -> dict[str, Any]:
        """The model's inputs.

        A mask says which tokens are there, even if all are. Without one, transformers looks for
        packed sequences, and gives attention a mask of [T, T] instead of `is_causal`; then every
        slice of attention keeps a float copy.
        """
        more: dict[str, Any] = {"input_ids": tokens_BT}
        if positions_BT is not None:
            more["position_ids"] = positions_BT
        elif self._takes_mask:
            more["attention_mask"] = (
                torch.ones_like(tokens_BT) if is_token_BT is None else is_token_BT.long()
            )
        if self._takes_cache:
            more["use_cache"] = False
        if decoder_BT is not None:
            more["decoder_input_ids"] = decoder_BT
        return more

    @cached_property
    @torch.no_grad()
    def keeps_apart(self) -> bool:
        """Whether positions that begin again keep documents apart, by a try. Collective.

        The log says where they do not.
        """
        apart = "position_ids" in self._library.arguments
        if apart:
            was_training, device = self._model.training, next(self._model.parameters()).device
            positions_BT = torch.arange(4, device=device).repeat(2)[None]
            first, other = (
                torch.tensor([[*before, 0, 1, 0, 1]], device=device)
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
