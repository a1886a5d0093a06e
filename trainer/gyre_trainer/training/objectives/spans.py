# ruff: noqa: N803, N806  # names carry shape letters
"""Span corruption (Raffel et al. 2020, arXiv 1910.10683), and text infilling (Lewis et al. 2019).

As in T5's own `random_spans_noise_mask`, the number of tokens and of spans that are taken out
follows from the length of the row alone, so full rows have one shape. Only places and lengths are
drawn.

Dims: T time, S spans.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_trainer.training.objectives.settings import ObjectiveConfig, Tokens

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lengths:
    """What becomes of the length of a row.

    Attributes:
        noise: tokens that are taken out.
        spans: the spans that these are.
        inputs: tokens that the encoder is given, the end included.
        targets: tokens that the decoder is to write, the end included.
    """

    noise: int
    spans: int
    inputs: int
    targets: int

    @classmethod
    def of(cls, num_tokens: int, objective: ObjectiveConfig) -> "Lengths":
        """The lengths for a row of ``num_tokens``; of fewer than two nothing is taken out."""
        noise = min(max(round(num_tokens * objective.rate), 1), num_tokens - 1)
        if num_tokens < 2:
            noise = 0
        spans = min(max(round(noise / objective.mean_span), 1), noise, num_tokens - noise)
        kept = num_tokens - noise + spans
        targets = num_tokens if objective.corruption == "mask" else noise + spans
        return cls(noise, spans, kept + 1, targets + 1)


def corrupted(
    row_T: Ids, objective: ObjectiveConfig, tokens: Tokens, rng: np.random.Generator
) -> tuple[Ids, Ids]:
    """What the encoder is given of a row without padding, and what the decoder is to write.

    Both end with the token that ends a text. A row begins with tokens that stay.

    Raises:
        ConfigError: there are no tokens to stand for spans.
    """
    lengths = Lengths.of(len(row_T), objective)
    # what stays stands before each span and, other than T5's code has it, perhaps behind the last
    # one: short rows have one span, which would always be their end
    kept_S = _parts(len(row_T) - lengths.noise + 1, lengths.spans + 1, rng)[:-1]
    gone_S = _parts(lengths.noise, lengths.spans, rng)
    bounds = np.cumsum(np.stack([kept_S, gone_S], axis=1).ravel())
    *pieces, rest = np.split(row_T, bounds)
    stays, spans = pieces[::2], pieces[1::2]
    by_sentinel = objective.corruption != "mask"
    marks = _marks(lengths.spans, tokens, by_sentinel=by_sentinel)
    end = np.array([] if tokens.end is None else [tokens.end], np.int64)
    inputs = [each for pair in zip(stays, marks, strict=True) for each in pair]
    written = [each for pair in zip(marks, spans, strict=True) for each in pair]
    targets = written if by_sentinel else [row_T]
    return np.concatenate([*inputs, rest, end]), np.concatenate([*targets, end])


def _marks(num_spans: int, tokens: Tokens, *, by_sentinel: bool) -> list[Ids]:
    """What stands for each span."""
    if by_sentinel:
        first = tokens.sentinels(num_spans)
        return [np.array([first - index], np.int64) for index in range(num_spans)]
    return [np.array([tokens.the_mask()], np.int64)] * num_spans


def _parts(total: int, num_parts: int, rng: np.random.Generator) -> Ids:
    """``num_parts`` positive numbers that add up to ``total``, each such list equally likely."""
    if not num_parts:
        return np.zeros(0, np.int64)
    cuts = np.sort(rng.permutation(total - 1)[: num_parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(np.int64)
