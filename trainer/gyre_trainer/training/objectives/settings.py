"""The section `[objective]` of the configuration."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from msgspec import Meta

from gyre_trainer.errors import ConfigError
from gyre_trainer.training.configuration.ranges import AtLeast0

Objective = Literal["causal", "masked", "denoising", "seq2seq"]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


@dataclass(frozen=True, slots=True)
class ObjectiveConfig:
    """What is hidden from a model that is trained to find it; `model.objective` says for what.

    Attributes:
        rate: the share of a row's tokens that are chosen (`masked`) or taken out (`denoising`).
        mean_span: tokens of a span that is taken out, on average.
        corruption: what stands for a span: a `sentinel` of its own, and the targets are all
            sentinels with their spans (T5); or the `mask` token, and the targets are the whole row
            (as BART's text infilling, without its spans of no tokens). `auto` is `mask` where
            there is a mask token and no sentinel, as `Tokens.settled` says.
        tokenizer: a `tokenizer.json` that says which ids are special; "" takes that of
            `model.pretrained`.
        mask_id: the mask token; None takes that of the tokenizer.
        sentinel_id: the first sentinel, from which the others count down; None takes
            `<extra_id_0>` of the tokenizer.
        special_ids: tokens that are never chosen, beside those of the tokenizer.
        target_field: of `seq2seq`: the field of a sample that holds its target.
        target_length: of `seq2seq`: tokens of a target; 0 for `data.sequence_length`.
    """

    rate: Annotated[float, Meta(gt=0, lt=1)] = 0.15
    mean_span: Annotated[float, Meta(ge=1, le=1e6)] = 3.0
    corruption: Literal["auto", "sentinel", "mask"] = "auto"
    tokenizer: str = ""
    mask_id: TokenId | None = None
    sentinel_id: TokenId | None = None
    special_ids: tuple[TokenId, ...] = ()
    target_field: str = ""
    target_length: AtLeast0 = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids with a meaning of their own.

    Attributes:
        vocab_size: of the model.
        pad: fills rows; it is never a token of a text.
        end: ends what an encoder-decoder reads and writes; None for a model that has none.
        start: what a decoder is given before the first target.
        mask: stands for a token, or a span, that is missing; None where there is none.
        sentinel: the first sentinel; the others count down from it. None where there is none.
        special: never chosen to be masked.
    """

    vocab_size: int
    pad: int
    end: int | None
    start: int
    mask: int | None
    sentinel: int | None
    special: frozenset[int]

    def settled(self, objective: ObjectiveConfig) -> ObjectiveConfig:
        """The same with a corruption: `auto` takes what there are tokens for, sentinels first."""
        if objective.corruption != "auto":
            return objective
        infills = self.sentinel is None and self.mask is not None
        return replace(objective, corruption="mask" if infills else "sentinel")

    def the_mask(self) -> int:
        """The mask token.

        Raises:
            ConfigError: there is none.
        """
        if self.mask is None:
            raise ConfigError(
                "there is no mask token: set `objective.mask_id`, or `objective.tokenizer`, the "
                "path of a tokenizer.json that has one"
            )
        return self.mask

    def sentinels(self, num: int) -> int:
        """The first of ``num`` sentinels that count down.

        Raises:
            ConfigError: there are none, or fewer.
        """
        if self.sentinel is None:
            raise ConfigError(
                "there are no sentinels: set `objective.sentinel_id`, or `objective.tokenizer`, "
                "the path of a tokenizer.json with <extra_id_0>; or, for a model such as BART "
                "that fills in a mask token, `objective.mask_id`"
            )
        if num > self.sentinel + 1:
            raise ConfigError(
                f"`data.sequence_length` has {num} spans, but there are {self.sentinel + 1} ids up "
                f"to the first sentinel, {self.sentinel}; make `objective.mean_span` larger"
            )
        return self.sentinel
