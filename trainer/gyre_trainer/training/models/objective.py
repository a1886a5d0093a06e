"""The section `[objective]` of the configuration."""

from dataclasses import dataclass
from typing import Literal

from gyre_trainer.training.configuration.ranges import AtLeast0

Objective = Literal["causal", "seq2seq"]


@dataclass(frozen=True, slots=True)
class ObjectiveConfig:
    """What an encoder-decoder is trained to write.

    Attributes:
        target_field: the field of a sample that holds its target; `data.field` has its source.
        target_length: tokens of a target; 0 for `data.sequence_length`.
    """

    target_field: str = ""
    target_length: AtLeast0 = 0
