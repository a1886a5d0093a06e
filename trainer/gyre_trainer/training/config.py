"""The configuration of a training run: a dataclass per section of the TOML file.

docs/training.md describes each key. All of it is checked before anything starts. Types and ranges
stand in the annotations, and msgspec checks them; docs/adr/0031 says how and why.
"""

import dataclasses
import difflib
import math
import reprlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch
from gyre_protos.text import counted

from gyre_trainer.errors import ConfigError
from gyre_trainer.training import config_file
from gyre_trainer.training.boards import BoardsConfig
from gyre_trainer.training.config_file import (
    AtLeast0,
    AtLeast1,
    Decay,
    Epsilon,
    NotNegative,
    NumThreads,
    Positive,
    Seconds,
    Seed,
    Text,
)
from gyre_trainer.training.gpt import GPTConfig
from gyre_trainer.training.library import LibraryConfig

ModelConfig = GPTConfig | LibraryConfig
Section = TypeVar("Section")
DType = Literal["float32", "bfloat16"]

# Keys whose values may be secrets, so that no message repeats them.
_SECRET = ("data.options",)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The run directory, the run's length, and how its ranks run."""

    out: Text
    steps: AtLeast1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: NumThreads = 0
    log_every: AtLeast1 = 10
    seed: Seed = 0
    replicas: AtLeast1 = 1
    timeout_s: Seconds = 120.0


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The dataset, and the order of its samples."""

    dataset: Text
    batch_size: AtLeast1
    sequence_length: AtLeast1
    address: str = ""
    format: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    field: Text = "tokens"
    seed: Seed = 0
    tail: Literal["wrap", "drop", "pad"] = "wrap"
    prefetch_batches: AtLeast0 = 0
    skip_steps: tuple[tuple[AtLeast0, AtLeast1], ...] | None = None
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """The dtypes on the ring. Once read, `compute_dtype` is float32 or bfloat16."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    grad_dtype: DType = "float32"
    tf32: bool = False


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Memory that a rank can save; `min_numel` is None for the default of `rotate_all`."""

    recompute: Literal["none", "block", "layer"] = "none"
    min_numel: AtLeast0 | None = None


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """The optimizer and its learning rates."""

    name: Literal["adamw", "adamw-8bit", "adafactor", "muon"] = "adamw"
    stochastic_rounding: bool = False
    lr: Positive = 1e-3
    min_lr: NotNegative = 1e-4
    warmup_steps: AtLeast0 = 0
    schedule: Literal["cosine", "linear", "constant", "warmup-stable-decay"] = "cosine"
    decay_steps: AtLeast0 = 0
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Epsilon = 1e-8
    weight_decay: NotNegative = 0.1
    clip_norm: NotNegative = 1.0
    accumulation_steps: AtLeast1 = 1

    def __post_init__(self) -> None:
        if (self.schedule == "warmup-stable-decay") != (self.decay_steps > 0):
            raise ConfigError(
                f"`optimizer.schedule` is {self.schedule} and `optimizer.decay_steps` is "
                f"{self.decay_steps}; warmup-stable-decay needs decay steps, and only it has them"
            )
        if self.schedule != "constant" and self.min_lr > self.lr:
            raise ConfigError(
                f"`optimizer.min_lr` is {self.min_lr:g}, above `optimizer.lr`, {self.lr:g}, so the "
                "rate would grow to the last step; make it smaller"
            )
        if self.name == "muon" and self.stochastic_rounding:
            raise ConfigError(
                "`optimizer.stochastic_rounding` is true, but muon rounds to the nearest. Set it "
                "to false, or `optimizer.name` to adamw"
            )

    @property
    def kind(self) -> str:
        """Name of the states in a checkpoint."""
        return f"{self.name}, rounded stochastically" if self.stochastic_rounding else self.name


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """When a run is saved."""

    every: AtLeast0 = 100
    keep: AtLeast1 = 2


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Evaluation, on the same batches every time."""

    dataset: str = ""
    every: AtLeast0 = 0
    batches: AtLeast1 = 8
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.every and not self.dataset:
            raise ConfigError(
                "`eval.every` is set but `eval.dataset` is not; name the dataset to evaluate on"
            )


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The whole file: a section per field."""

    run: RunConfig
    data: DataConfig
    model: ModelConfig
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    boards: BoardsConfig = dataclasses.field(default_factory=BoardsConfig)

    def __post_init__(self) -> None:
        if self.precision.compute_dtype == "auto":
            on_cuda = self.run.device != "cpu" and torch.cuda.is_available()
            precision = dataclasses.replace(
                self.precision,
                compute_dtype="bfloat16" if on_cuda or self.run.device == "cuda" else "float32",
            )
            object.__setattr__(self, "precision", precision)
        if self.optimizer.warmup_steps + self.optimizer.decay_steps > self.run.steps:
            raise ConfigError(
                f"`optimizer.warmup_steps` and `optimizer.decay_steps` are "
                f"{self.optimizer.warmup_steps} and {self.optimizer.decay_steps}, "
                f"but the run has {counted(self.run.steps, 'step')}"
            )
        length, model = self.data.sequence_length, self.model
        if isinstance(model, GPTConfig) and length > model.max_seq_len:
            raise ConfigError(
                f"`data.sequence_length` is {length}, but `model.max_seq_len` is "
                f"{model.max_seq_len}"
            )

    def require_divisible(self, world_size: int) -> None:
        """Check that the ranks divide evenly among rings, and the global batch among the ranks.

        Raises:
            ConfigError: names the factor of the number of ranks, or of the batch size.
        """
        if world_size % self.run.replicas:
            raise ConfigError(
                f"there are {world_size} ranks, but `run.replicas` is {self.run.replicas}; "
                "make the number of ranks a multiple of it"
            )
        num_steps = self.optimizer.accumulation_steps
        parts = world_size * num_steps
        if self.data.batch_size % parts:
            times = f" times {num_steps} accumulation steps" if num_steps > 1 else ""
            raise ConfigError(
                f"`data.batch_size` is {self.data.batch_size}; it must be a multiple of {parts}, "
                f"the number of ranks{times}"
            )


def load(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in the file ``path``, with ``section.key=value`` overrides.

    `model.max_seq_len` equals `data.sequence_length` unless it is set.

    Raises:
        ConfigError: the file cannot be read, or it or an override does not describe a run.
    """
    table = config_file.read(path, overrides)
    data, model = table.get("data"), table.get("model")
    length = data.get("sequence_length") if isinstance(data, dict) else None
    if length is not None and isinstance(model, dict) and _model_class(model) is GPTConfig:
        model.setdefault("max_seq_len", length)
    return build(TrainConfig, table)


def of_model(
    path: str, sequence_length: int, batch_size: int, overrides: Sequence[str] = ()
) -> TrainConfig:
    """The configuration of a run of the model of `transformers` at ``path``, without a dataset.

    Raises:
        ConfigError: an override does not describe a run.
    """
    table: dict[str, Any] = {
        "run": {"out": "run", "steps": 1},
        "data": {"dataset": "none", "sequence_length": sequence_length, "batch_size": batch_size},
        "model": {"pretrained": path},
    }
    config_file.override(table, overrides)
    return build(TrainConfig, table)


def build(cls: type[Section], table: Mapping[str, Any], where: str = "") -> Section:
    """The dataclass with the values of a table; absent keys keep their defaults.

    Args:
        cls: its fields are dataclasses, for which the table holds tables, or types that msgspec
            knows; annotations may carry its `Meta`.
        table: as TOML gives it.
        where: the dotted name of the table for errors; "" for the whole file.

    Raises:
        ConfigError: a key is unknown (the error names the nearest known one) or missing, a value
            has the wrong type or range, or the dataclass itself refuses the values.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    prefix = f"{where}." if where else ""
    for key in table.keys() - hints.keys():
        close = difflib.get_close_matches(key, hints, n=1)
        advice = f"did you mean `{close[0]}`?" if close else f"known are {', '.join(sorted(hints))}"
        raise ConfigError(f"unknown key `{prefix}{key}`; {advice}")
    for each in dataclasses.fields(cls):  # type: ignore[arg-type]
        is_required = each.default is MISSING and each.default_factory is MISSING
        if is_required and each.name not in table:
            raise ConfigError(f"`{prefix}{each.name}` is missing")
    return cls(**{key: _convert(value, hints[key], prefix + key) for key, value in table.items()})


def _model_class(table: Mapping[str, Any]) -> type[ModelConfig]:
    return LibraryConfig if table.keys() & {"pretrained", "config"} else GPTConfig


def _convert(value: Any, hint: Any, name: str) -> Any:
    if hint == ModelConfig:
        table = _convert(value, dict[str, Any], name)
        return build(_model_class(table), table, name)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build(hint, _convert(value, dict[str, Any], name), name)
    try:
        converted = msgspec.convert(value, hint)
        numbers = converted if isinstance(converted, tuple) else (converted,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ValueError("expected a finite number")
        if any(isinstance(text, str) and not text.isprintable() for text in (converted, value)):
            raise ValueError("expected text without control characters")
    except ValueError as error:  # also of msgspec
        shown = "not as expected" if name in _SECRET else reprlib.repr(value)
        raise ConfigError(f"`{name}` is {shown}: {_explain(error, hint)}") from error
    return converted


def _explain(error: ValueError, hint: Any) -> str:
    """The expected type, with TOML's names for lists and tables."""
    if typing.get_origin(hint) is Literal:
        return f"expected one of {', '.join(typing.get_args(hint))}"
    text = str(error).partition(", got ")[0].partition(" - at ")[0]
    text = text.replace("`array`", "a list").replace("`object`", "a table")
    return text[0].lower() + text[1:]


def learning_rate(step: int, num_steps: int, optimizer: OptimizerConfig) -> float:
    """The learning rate of step ``step`` of [0, num_steps): a linear warm-up, then a schedule.

    constant             stays at `lr`
    cosine               falls to `min_lr` at the last step, as half a cosine (arXiv 1608.03983)
    linear               falls to `min_lr` at the last step, by equal amounts
    warmup-stable-decay  stays at `lr`, and falls by equal amounts in the last `decay_steps`
                         (arXiv 2404.06395)

    It grows in equal amounts to `lr` at the last warm-up step. It depends on the step alone, so a
    resumed run continues exactly.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    # The last step before the decay has the peak rate.
    last_at_peak = optimizer.warmup_steps
    if optimizer.schedule == "warmup-stable-decay":
        last_at_peak = num_steps - 1 - optimizer.decay_steps
    done = (step - last_at_peak) / max(1, num_steps - 1 - last_at_peak)
    done = min(1.0, max(0.0, done))
    heights = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * done)) / 2}
    height = heights.get(optimizer.schedule, 1 - done)  # 1 at `lr`, 0 at `min_lr`
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * height
