# ruff: noqa: N803, N806  # names carry shape letters
"""The loss of a language model, without all of its logits where the model allows that.

Dims: B batch, T time, D features, V vocabulary.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.errors import ConfigError
from gyre_trainer.layers.head.deferred_logits import asked_to_defer
from gyre_trainer.rotate import linear_cross_entropy
from gyre_trainer.rotation.guard import own_class
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


class LossHead(nn.Module):
    """A model's head and its loss in one: it stands where the head stood.

    Attributes:
        head: the head, rotated or not.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head
        self.targets_BT: Tensor | None = None
        self.weights_BT: Tensor | None = None
        self.loss: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The head's weight: some models ask for its dtype."""
        return self.head.weight

    @property
    def bias(self) -> Tensor | None:
        """The head's bias: the library gives some models that of a head that is put in."""
        return self.head.bias

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The mean cross-entropy of the targets that were set before; the logits without any."""
        if self.targets_BT is None:
            logits: Tensor = self.head(x_BTD)
            return logits
        if self.weights_BT is None:
            self.loss = linear_cross_entropy(self.head, x_BTD, self.targets_BT)
        else:
            self.loss = weighted_cross_entropy(self.head, x_BTD, self.targets_BT, self.weights_BT)
        return self.loss


class LibraryLoss:
    """The loss of a language model of `transformers`.

    Where the model returns what its head computes, the head computes the loss at once, by slices of
    the vocabulary. Other models scale or cap their logits: in training a rotated head defers these,
    and their loss goes through slices too; otherwise they exist as a whole.

    Attributes:
        head: computes the loss.
    """

    def __init__(self, model: nn.Module) -> None:
        head = model.get_output_embeddings()  # type: ignore[operator]
        if isinstance(head, LossHead):
            self.head, self._place = head, None
        elif isinstance(head, nn.Linear):
            path = next(path for path, module in model.named_modules() if module is head)
            parent, _, name = path.rpartition(".")
            self.head, self._place = LossHead(head), (model.get_submodule(parent), name)
        else:
            raise ConfigError(
                f"the head of {type(model).__name__} is {type(head).__name__}, no linear layer"
            )
        self._model = model
        self._is_fused = True
        taken = inspect.signature(model.forward).parameters
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
            tokens_BT: what the model is given, of an encoder-decoder its encoder: [B, S].
            targets_BT: what it is to predict.
            weights_BT: of each target.
            positions_BT: of each token in its document.
            is_token_BT: false for padding, of the shape of ``tokens_BT``; None for none.
            decoder_BT: what the decoder is given, where there is one.
        """
        if positions_BT is not None and not self.keeps_apart:
            positions_BT = None
        call = partial(self._call, tokens_BT, positions_BT, is_token_BT, decoder_BT)
        if self._is_fused:
            self.head.targets_BT, self.head.weights_BT = targets_BT, weights_BT
            with self._in_place():
                output = call()
            loss, self.head.loss = self.head.loss, None
            if loss is not None and output.logits is loss:
                return loss
            self._is_fused, self.head.targets_BT = False, None
        with asked_to_defer(self.head.head):
            logits_BTV: Tensor = call().logits
        logits = logits_BTV.reshape(-1, logits_BTV.shape[-1]).float()
        losses = F.cross_entropy(logits, targets_BT.flatten(), reduction="none")
        losses_BT = losses.view_as(targets_BT)
        return losses_BT.mean() if weights_BT is None else _mean(losses_BT, weights_BT)

    def _call(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None,
        is_token_BT: Tensor | None = None,
        decoder_BT: Tensor | None = None,
    ) -> Any:
        """The model's output.

        A mask says which tokens are there, even if all are. Without one, transformers looks for
        packed sequences, and gives attention a mask of [T, T] instead of `is_causal`; then every
        slice of attention keeps a float copy.
        """
        more: dict[str, Any] = {}
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
        return self._model(input_ids=tokens_BT, **more)

    @cached_property
    @torch.no_grad()
    def keeps_apart(self) -> bool:
        """Whether positions that begin again keep documents apart, by a try. Collective.

        The log says where they do not.
        """
        apart = "position_ids" in inspect.signature(self._model.forward).parameters
        if apart:
            was_training, device = self._model.training, next(self._model.parameters()).device
            positions_BT = torch.arange(4, device=device).repeat(2)[None]
            first, other = (
                torch.tensor([[*before, 0, 1, 0, 1]], device=device)
                for before in ((0, 0, 0, 0), (1, 1, 1, 1))
            )
            self._model.eval()
            one, two = (self._call(each, positions_BT).logits[:, 4:] for each in (first, other))
            self._model.train(was_training)
            apart = torch.allclose(one, two, rtol=1e-3, atol=1e-4 * float(one.abs().max()))
        if not apart:
            _log.warning(
                "%s does not keep packed documents apart: tokens see those of earlier documents",
                own_class(self._model).__name__,
            )
        return apart

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """A context in which the head computes the loss."""
        if self._place is None:
            yield
            return
        parent, name = self._place
        setattr(parent, name, self.head)
        try:
            yield
        finally:
            setattr(parent, name, self.head.head)


def _mean(losses_BT: Tensor, weights_BT: Tensor) -> Tensor:
    weights_BT = weights_BT.to(losses_BT.dtype)
    return (losses_BT * weights_BT).sum() / weights_BT.sum()
