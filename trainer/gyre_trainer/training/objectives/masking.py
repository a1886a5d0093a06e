# ruff: noqa: N803, N806  # names carry shape letters
"""Masked language modelling (Devlin et al. 2019), as DataCollatorForLanguageModeling does it.

Dims: T time.
"""

import numpy as np
import numpy.typing as npt

from gyre_trainer.training.objectives.settings import Tokens

_MASKED, _REPLACED = 0.8, 0.1  # the rest of the chosen tokens stays


def masked(
    row_T: npt.NDArray[np.int64],
    may_be_chosen_T: npt.NDArray[np.bool_],
    rate: float,
    tokens: Tokens,
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """A row with a share of its tokens hidden, and which ones those are.

    Each token is chosen by itself, with the probability ``rate``. Of those, 80 % become the mask
    token and 10 % a random one of the whole vocabulary. Special tokens are not chosen.

    Raises:
        ConfigError: there is no mask token.
    """
    chosen_T = (rng.random(len(row_T)) < rate) & may_be_chosen_T
    chosen_T &= ~np.isin(row_T, list(tokens.special))
    fate_T = rng.random(len(row_T))
    random_T = rng.integers(tokens.vocab_size, size=len(row_T))
    hidden_T = np.where(chosen_T & (fate_T < _MASKED), tokens.the_mask(), row_T)
    is_random_T = chosen_T & (fate_T >= _MASKED) & (fate_T < _MASKED + _REPLACED)
    return np.where(is_random_T, random_T, hidden_T), chosen_T
