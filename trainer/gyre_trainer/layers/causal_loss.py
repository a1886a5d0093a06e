# ruff: noqa: N803, N806  # names carry shape letters
"""The loss of a language model of `transformers`, without the logits of all tokens.

[Note: The head computes the loss]

Called with `labels`, such a model computes all logits and then their cross-entropy. Here the
library's own forward runs without labels, and a `LossHead` stands where the model's head stood: it
is given the decoder's output, and computes the loss by slices of the vocabulary. What the library
would do to the logits after the head, a scale or a cap, and the router's loss that it would add,
are read from the model's configuration. Before the first loss, the library computes one of eight
tokens from given logits; where that is another number, the model's loss is refused.

Dims: B batch, T time, D features, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.head import LogitTransform, linear_cross_entropy, wide
from gyre_trainer.rotation.rotated_module import RotatedModule, num_hooks_of, own_class
from gyre_trainer.torch_internals import is_fake, uncompiled
from gyre_trainer.whole.replicated import ReplicatedModule

# The effect of a configuration's key on the loss, and the families that have it. One of a family
# missing here shows in the comparison with the library's own loss.
_KEYS: tuple[tuple[str, str, str], ...] = (
    ("final_logit_softcapping", "cap", "Gemma 2, 3, 3n, T5Gemma, VaultGemma"),
    ("logits_soft_cap", "cap", "RecurrentGemma"),
    ("output_logit_soft_cap", "cap", "xLSTM"),
    ("logit_scale", "factor", "Cohere, Cohere 2"),
    ("lm_head_multiplier", "factor", "Falcon-H1"),
    ("logits_scaling", "divisor", "Granite, GraniteMoe, GraniteMoeShared, GraniteMoeHybrid"),
    ("router_aux_loss_coef", "router", "Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GPT-OSS, Jamba"),
    ("aux_loss_coef", "router", "JetMoe"),
    ("ffn_config.moe_loss_weight", "router", "DBRX"),
)
_IGNORED = -100
_NUM_TOKENS = 8
_LARGEST_LOGIT = 60  # integers up to it are exact in bfloat16, and no cap leaves them as they are

LossOfFeatures = Callable[..., Tensor]
"""Takes the head, its input [B, T, D], and `scale` and `soft_cap`; returns a scalar."""


@uncompiled
def causal_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """`model(**batch).loss` of a language model of `transformers`, without all of its logits.

    It is for decoders and encoder-decoders whose head is an `nn.Linear`, rotated or not. The
    decoder's output goes to `linear_cross_entropy`. A scale or a cap of the logits and the router's
    loss are those of the model's configuration. The first call compares all of it with the
    library's own loss, on eight tokens. Collective, as a call of the model is.

    Args:
        model: as `transformers` or peft made it.
        batch: what the model takes, `labels` among it: int64 [B, T], -100 where a token has no
            loss. They are shifted here, unless the model is an encoder-decoder, or the batch has
            them shifted, as `shift_labels`. `num_items_in_batch` divides the sum of the losses,
            instead of the number of labels.

    Returns:
        A scalar, in nats; float32, or float64 if the model is.

    Raises:
        RotationError: the batch has no labels; or the loss of this model is another one, or its
            head no linear layer, or has a hook: call `model(labels=...)`.

    Example:
        loss = causal_loss(model, {"input_ids": tokens, "labels": tokens})
        loss.backward()
    """
    inputs = dict(batch)
    names = "labels", "shift_labels", "num_items_in_batch"
    labels_BT, shifted_BT, num_items = (inputs.pop(name, None) for name in names)
    if labels_BT is None:
        raise RotationError(
            f"causal_loss: the batch has no labels (got {', '.join(inputs) or 'nothing'}). "
            'Add "labels", such as a copy of input_ids.'
        )
    library = LibraryModel(model)
    if library.is_encoder_decoder and "decoder_input_ids" not in inputs:
        prepare: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if prepare is None:
            raise RotationError(
                f"{library.name} makes no decoder_input_ids from labels. Add them to the batch."
            )
        inputs["decoder_input_ids"] = prepare(labels=labels_BT)
    mask_BT = inputs.get("attention_mask")
    _, leaves_padding_out = library.compared()
    if leaves_padding_out and torch.is_tensor(mask_BT) and shifted_BT is None:
        labels_BT = labels_BT.masked_fill(mask_BT.to(labels_BT.device) == 0, _IGNORED)
    if not library.is_encoder_decoder:
        labels_BT = _next_tokens(labels_BT) if shifted_BT is None else shifted_BT

    def compute(head: nn.Linear, x_BTD: Tensor, **transform: Any) -> Tensor:
        total = linear_cross_entropy(head, x_BTD, labels_BT, reduction="sum", **transform)
        count: Tensor | int = (labels_BT != _IGNORED).sum() if num_items is None else num_items
        return total / count

    return library.loss(inputs, compute)


class LossHead(nn.Module):
    """A model's head and its loss in one: it stands where the head stood.

    Attributes:
        head: the head, rotated or not.
        compute: takes the head and its input, and returns the loss; None where logits are wanted.
        loss: its result.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head
        self.compute: Callable[[nn.Linear, Tensor], Tensor] | None = None
        self.loss: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The head's weight: some models ask for its dtype."""
        return self.head.weight

    @property
    def bias(self) -> Tensor | None:
        """The head's bias: the library gives some models that of a head put in."""
        return self.head.bias

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The results to compute; the logits if that is nothing."""
        if self.compute is None:
            logits: Tensor = self.head(x_BTD)
            return logits
        self.loss = self.compute(self.head, x_BTD)
        return self.loss


# By model: results of `LibraryModel.compared`.
_COMPARED: WeakKeyDictionary[nn.Module, tuple[str, bool]] = WeakKeyDictionary()


class LibraryModel:
    """A language model of `transformers`, and how its loss follows from its head's input.

    Attributes:
        name: of its class.
        arguments: those of its forward.
        is_encoder_decoder: whether labels are the decoder's targets as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the head.

        Raises:
            RotationError: there is none, or it is no linear layer, or has a hook.
        """
        self.name = own_class(model).__name__
        head = _head_of(model)
        if isinstance(head, LossHead):
            self._head, self._place = head, None
        elif isinstance(head, nn.Linear):
            modules = chain(model.named_children(), model.named_modules())  # mostly a child
            path = next(path for path, module in modules if module is head)
            parent, _, name = path.rpartition(".")
            self._head, self._place = LossHead(head), (model.get_submodule(parent), name)
        else:
            raise RotationError(
                f"{self.name}: a loss by slices of the vocabulary needs an nn.Linear as head"
                f" (got {'none' if head is None else type(head).__name__}). "
                "Call model(labels=...), or linear_cross_entropy for a model of your own."
            )
        if num_hooks_of(self._head.head):
            raise RotationError(
                f"{self.name}: a hook is registered on the head, which would get no logits. "
                "Remove it, or call model(labels=...)."
            )
        self._model = model
        self.arguments = inspect.signature(model.forward).parameters
        self._config: Any = getattr(model, "config", None)
        self.is_encoder_decoder = bool(getattr(self._config, "is_encoder_decoder", False))
        self._transform, self._router_factor = _effects(self._config)

    def loss(self, inputs: Mapping[str, Any], compute: LossOfFeatures) -> Tensor:
        """What ``compute`` makes of the head's input, and the router's loss if there is one.

        Args:
            inputs: of the model, without labels.
            compute: see `LossOfFeatures`.

        Raises:
            RotationError: the library's own loss is another one.
        """
        problem, _ = self.compared()
        if problem:
            raise RotationError(problem)
        transform = {"scale": self._transform.scale, "soft_cap": self._transform.soft_cap}
        loss, output = self._run(inputs, partial(compute, **transform))
        return self._with_router(loss, output)

    def compared(self) -> tuple[str, bool]:
        """Why its loss is not computed here, empty if it is; and whether it leaves padding out.

        Then tokens that `attention_mask` hides have no loss, even with labels, as in Gemma 3's for
        images. The first call is collective.
        """
        if self._model not in _COMPARED:
            found = self._compare()
            if found is None:
                return "", False
            _COMPARED[self._model] = found
        return _COMPARED[self._model]

    def _run(
        self, inputs: Mapping[str, Any], compute: Callable[[nn.Linear, Tensor], Tensor]
    ) -> tuple[Tensor, Any]:
        """The result of ``compute``, and the model's output."""
        more = {"use_cache": False} if "use_cache" in self.arguments else {}
        with self._in_place(compute):
            output = self._model(**more | dict(inputs))
        result, self._head.loss = self._head.loss, None
        if result is None:
            raise TypeError("the model does not call its head")
        return result, output

    def _with_router(self, loss: Tensor, output: Any) -> Tensor:
        of_router = getattr(output, "aux_loss", None)
        return loss + self._router_factor * of_router if torch.is_tensor(of_router) else loss

    @torch.no_grad()
    def _compare(self) -> tuple[str, bool] | None:
        """How the library's loss of given logits differs; None on fake tensors. See `compared`.

        The logits are the same for all models, so they are large whatever the weights are. In
        evaluation nothing drops out, so no random number is drawn.
        """
        head = self._head.head
        ids_BT = (torch.arange(_NUM_TOKENS, device=head.weight.device) + 2)[None]
        ids_BT %= head.out_features
        if is_fake(ids_BT):
            return None
        leaves_padding_out = False
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            expected, found, is_same = self._losses(ids_BT)
            has_padding = "attention_mask" in self.arguments and not self.is_encoder_decoder
            if is_same and has_padding and not self._losses(ids_BT, num_hidden=1)[2]:
                leaves_padding_out = True
                expected, found, is_same = self._losses(ids_BT, 1, leaves_padding_out=True)
        except RotationError:
            raise
        except (TypeError, ValueError) as error:  # it takes other inputs, or another forward
            problem = f"cannot compute the loss of a row of tokens ({error})"
            return f"{self.name}: causal_loss {problem}. Call model(labels=...).", False
        finally:
            for module, training in modes:
                module.training = training
        if is_same:
            return "", leaves_padding_out
        return (
            f"{self.name}: causal_loss does not know the loss of this family (on eight tokens got "
            f"{float(expected):.6g}, the library {float(found):.6g}). Call model(labels=...)."
        ), False

    def _losses(
        self, ids_BT: Tensor, num_hidden: int = 0, *, leaves_padding_out: bool = False
    ) -> tuple[Tensor, Tensor, bool]:
        """The loss of given logits, the library's own, and whether they are the same.

        The last ``num_hidden`` tokens are padding by the mask, and have labels all the same.
        """
        inputs = {"input_ids": ids_BT, "labels": ids_BT}
        is_hidden = torch.arange(_NUM_TOKENS, device=ids_BT.device) >= _NUM_TOKENS - num_hidden
        if "attention_mask" in self.arguments:
            inputs["attention_mask"] = torch.ones_like(ids_BT).masked_fill(is_hidden, 0)
        if self.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids_BT
        logits_BTV, output = self._run(inputs, _given_logits)
        found = getattr(output, "loss", None)
        if found is None:
            raise TypeError("the model returns no loss for labels")
        counted_BT = ids_BT.masked_fill(is_hidden, _IGNORED) if leaves_padding_out else ids_BT
        labels_BT = counted_BT if self.is_encoder_decoder else _next_tokens(counted_BT)
        logits_TV = logits_BTV.flatten(0, -2).to(wide(logits_BTV.dtype), copy=True)
        expected = F.cross_entropy(self._transform.apply_(logits_TV), labels_BT.flatten())
        expected = self._with_router(expected, output)
        rounding = max(4 * torch.finfo(logits_BTV.dtype).eps, 1e-5)
        return expected, found, bool((found - expected).abs() <= rounding * expected.abs())

    @contextmanager
    def _in_place(self, compute: Callable[[nn.Linear, Tensor], Tensor]) -> Iterator[None]:
        """A context in which the head computes."""
        self._head.compute = compute
        if self._place is not None:
            setattr(*self._place, self._head)
        try:
            yield
        finally:
            self._head.compute = None
            if self._place is not None:
                setattr(*self._place, self._head.head)


def takes_causal_loss(model: nn.Module) -> bool:
    """Whether the model is rotated, and `causal_loss` is its loss. The first call is collective."""
    if not isinstance(_head_of(model), RotatedModule | ReplicatedModule):
        return False
    try:
        library = LibraryModel(model)
    except RotationError:  # its head is no linear layer, or has a hook
        return False
    problem, _ = library.compared()
    return not problem


def _head_of(model: nn.Module) -> Any:
    """What `transformers` says is the model's head; None for other models."""
    get: Any = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()


def _next_tokens(labels_BT: Tensor) -> Tensor:
    return F.pad(labels_BT, (0, 1), value=_IGNORED)[..., 1:]


def _given_logits(head: nn.Linear, x_BTD: Tensor) -> Tensor:
    """Logits [B, T, V] that do not depend on any weight."""
    shape = *x_BTD.shape[:-1], head.out_features
    places = torch.arange(shape[-2] * shape[-1], device=x_BTD.device).view(shape[-2:])
    values = places * 7919 % (2 * _LARGEST_LOGIT + 1) - _LARGEST_LOGIT
    return values.to(x_BTD.dtype).expand(shape).contiguous()


def _effects(config: Any) -> tuple[LogitTransform, float]:
    """What the configuration says is done to logits, and the factor of the router's loss."""
    scale, cap, router = 1.0, None, 0.0
    # of an encoder-decoder without a configuration for each, the library returns a copy
    is_flat = getattr(config, "is_encoder_decoder", False) and not hasattr(config, "decoder")
    has_text = hasattr(config, "get_text_config") and not is_flat
    text = config.get_text_config(decoder=True) if has_text else config
    for path, effect, _ in _KEYS:
        value = reduce(lambda at, name: getattr(at, name, None), path.split("."), text)
        if not isinstance(value, int | float):
            continue
        match effect:
            case "cap":
                cap = float(value)
            case "factor":
                scale *= value
            case "divisor":
                scale /= value
            case _:
                router = float(value)
    return LogitTransform(scale, cap), router
