"""The ranges of configured values, as annotations that msgspec checks, and small sections.

Each upper bound is far beyond any run, and within what torch, msgspec and the kernel can hold. A
value beyond it would fail later, or keep a command busy for ever.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

_MAX_INT = 2**31 - 1
_MAX_FLOAT = 3.4e38  # parameters are float32

AtLeast0 = Annotated[int, Meta(ge=0, le=_MAX_INT)]
AtLeast1 = Annotated[int, Meta(ge=1, le=_MAX_INT)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NumLayers = Annotated[int, Meta(ge=1, le=10_000)]
NumThreads = Annotated[int, Meta(ge=0, le=4096)]
Positive = Annotated[float, Meta(gt=0, le=_MAX_FLOAT)]
NotNegative = Annotated[float, Meta(ge=0, le=_MAX_FLOAT)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
# A smaller epsilon is 0 in float32, and a parameter without a gradient would become 0 / 0.
Epsilon = Annotated[float, Meta(ge=1e-37, le=_MAX_FLOAT)]
# A base below 1 makes frequencies that float32 cannot hold.
RotaryBase = Annotated[float, Meta(ge=1, le=_MAX_FLOAT)]
Seconds = Annotated[float, Meta(ge=0.001, le=1e8)]
Text = Annotated[str, Meta(min_length=1)]


Objective = Literal["causal", "seq2seq"]


@dataclass(frozen=True, slots=True)
class ObjectiveConfig:
    """The targets of an encoder-decoder.

    Attributes:
        target_field: the field of a sample that holds its target; `data.field` has its source.
        target_length: tokens of a target; 0 for `data.sequence_length`.
    """

    target_field: str = ""
    target_length: AtLeast0 = 0
