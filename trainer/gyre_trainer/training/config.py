"""The configuration of a training run: frozen dataclasses for the TOML file's sections.

It is checked as a whole before anything starts.
"""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gyre_trainer.errors import ConfigError
from gyre_trainer.training.gpt import GPTConfig
from gyre_trainer.training.schema import build, nearest

DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The run directory, the run's length, and how its ranks run.

    Attributes:
        out: the run directory; checkpoints, history and report are written there.
        steps: optimizer steps of the whole run, those before a resume included.
        device: `auto` takes CUDA where every local rank has a device of its own, else the CPU.
        threads: threads of one rank's operators on the CPU; 0 shares the machine's cores among its
            ranks.
        log_every: steps between two writes to history, TensorBoard and progress; each takes one
            small collective.
        seed: the seed of the initial weights.
        timeout_s: the longest that a rank waits for another in one hop or collective before the job
            ends.
    """

    out: str
    steps: int
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0
    log_every: int = 10
    seed: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _require_positive("run", self, ("steps", "log_every", "timeout_s"))
        _require_at_least_zero("run", self, ("threads", "seed"))
        if not self.out:
            raise ConfigError("`run.out` is empty; name the directory that the run is to live in")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The dataset, and the order of its samples.

    Attributes:
        dataset: a name that the daemon knows; with `format`, a path or URI.
        address: the daemon's address; "" takes GYRE_ADDRESS, and where `format` is set the first
            rank of each machine starts a private daemon for the machine's ranks.
        format: tokens or webdataset: makes `dataset` a definition of its own, as the daemon's
            configuration would have it.
        options: the other keys of that definition.
        field: the tensor of a sample that holds its tokens, or its text as bytes.
        batch_size: samples in a global batch, over all ranks, for one optimizer step.
        sequence_length: targets per sample; a sample is one token longer.
        seed: the seed of the global shuffle.
        tail: what happens to the last samples of an epoch that do not fill a global batch.
        prefetch_batches: batches that the daemon keeps ready or in flight for each rank.
    """

    dataset: str
    batch_size: int
    sequence_length: int
    address: str = ""
    format: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    field: str = "tokens"
    seed: int = 0
    tail: Literal["wrap", "drop", "pad"] = "wrap"
    prefetch_batches: int = 8

    def __post_init__(self) -> None:
        _require_positive("data", self, ("batch_size", "sequence_length", "prefetch_batches"))
        _require_at_least_zero("data", self, ("seed",))


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """The dtypes of travelling slices; own shards and optimizer state are always float32.

    Attributes:
        compute_dtype: the dtype of travelling parameter shards and of activations.
        grad_dtype: the dtype of gradients on the ring.
    """

    compute_dtype: DType = "float32"
    grad_dtype: DType = "float32"


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Memory that a rank can save.

    Attributes:
        recompute: whether only the input of each norm is kept of it and the attention or MLP after
            it; backward then computes each slice again.
    """

    recompute: bool = False


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW under a linear warm-up and a cosine decay.

    Attributes:
        lr: the peak learning rate, reached after the warm-up.
        min_lr: the learning rate of the last step.
        warmup_steps: steps from 0 to `lr`.
        betas: decay of AdamW's first and second moment.
        eps: AdamW's epsilon.
        weight_decay: for parameters with two or more dims.
        clip_norm: the global norm that gradients are clipped to; 0 for no clipping.
        accumulation_steps: parts of a rank's slice of the batch, which it computes one after the
            other.
    """

    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        _require_positive("optimizer", self, ("lr", "eps", "accumulation_steps"))
        _require_at_least_zero("optimizer", self, ("min_lr", "warmup_steps", "weight_decay", "clip_norm"))
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"`optimizer.betas` must lie in [0, 1), but are {list(self.betas)}")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """When a run is saved.

    Attributes:
        every: steps between two checkpoints; one more is written at the end. 0 for none at all.
        keep: how many of the newest checkpoints stay on disk.
    """

    every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        _require_positive("checkpoint", self, ("keep",))
        _require_at_least_zero("checkpoint", self, ("every",))


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """A dataset, or another order of the same, for evaluation: the same batches every time.

    Attributes:
        dataset: as `data.dataset`.
        every: steps between two evaluations; 0 for none.
        batches: global batches of `data.batch_size` samples in one evaluation.
        seed: the seed of the order whose first batches are used.
    """

    dataset: str = ""
    every: int = 0
    batches: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        _require_positive("eval", self, ("batches",))
        _require_at_least_zero("eval", self, ("every", "seed"))
        if self.every and not self.dataset:
            raise ConfigError("`eval.every` is set but `eval.dataset` is not; name the dataset to evaluate on")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The whole file."""

    run: RunConfig
    data: DataConfig
    model: GPTConfig
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        if self.optimizer.warmup_steps > self.run.steps:
            raise ConfigError(
                f"`optimizer.warmup_steps` is {self.optimizer.warmup_steps}, but the run has {self.run.steps} steps"
            )

    def require_divisible(self, world_size: int) -> None:
        """Refuse a world size that does not divide the global batch evenly.

        Raises:
            ConfigError: says what the batch size must be a multiple of.
        """
        parts = world_size * self.optimizer.accumulation_steps
        if self.data.batch_size % parts:
            raise ConfigError(
                f"`data.batch_size` is {self.data.batch_size}; it must be a multiple of {parts} "
                f"({world_size} ranks times {self.optimizer.accumulation_steps} accumulation steps)"
            )


def load(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in the file ``path``, with ``section.key=value`` overrides.

    `model.max_seq_len` equals `data.sequence_length` unless it is set.

    Raises:
        ConfigError: the file cannot be read, or it or an override does not describe a run.
    """
    table = _read(path)
    for override in overrides:
        _override(table, override)
    data, model = table.get("data"), table.get("model")
    if isinstance(data, dict) and isinstance(model, dict) and "sequence_length" in data:
        model.setdefault("max_seq_len", data["sequence_length"])
    return build(TrainConfig, table, "")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _override(table: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or not key:
        raise ConfigError(f"--set {text!r} is not of the form section.key=value")
    sections = [f.name for f in dataclasses.fields(TrainConfig)]
    if section not in sections:
        raise ConfigError(f"unknown section `{section}` in --set{nearest(section, sections)}")
    target = table.setdefault(section, {})
    if not isinstance(target, dict):
        raise ConfigError(f"`{section}` must be a table: [{section}]")
    target[key] = _parse_value(value.strip())


def _parse_value(text: str) -> Any:
    """A TOML value; other text is a string, so paths and names need no second quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _require_positive(section: str, values: object, names: Sequence[str]) -> None:
    for name in names:
        if not getattr(values, name) > 0:
            raise ConfigError(f"`{section}.{name}` must be positive, but is {getattr(values, name)}")


def _require_at_least_zero(section: str, values: object, names: Sequence[str]) -> None:
    for name in names:
        if not getattr(values, name) >= 0:
            raise ConfigError(f"`{section}.{name}` must not be negative, but is {getattr(values, name)}")
