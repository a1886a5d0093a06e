"""Causal language models of `transformers`, from their configuration alone.

Nothing is downloaded, and no code is run that a folder brings.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from gyre_trainer.errors import ConfigError
from gyre_trainer.training.models.lora import Lora

_BY_SCRIPT = (
    'train it by a script with rotate_all, as docs/rtp.md describes under "Your own model", or in '
    "Hugging Face's Trainer with ShardedTrainer"
)


@dataclass(frozen=True, slots=True)
class LibraryConfig:
    """A model of `transformers`, by its folder or by the keys of its configuration.

    Attributes:
        pretrained: a folder with `config.json`, and with weights to train from; `gyre-train plan`
            takes the file, too.
        config: the keys of a `config.json`: `model_type`, and those that have no default.
        lora: adapters; where there are any, only they are trained.
    """

    pretrained: str = ""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lora: Lora = dataclasses.field(default_factory=Lora)

    def __post_init__(self) -> None:
        if bool(self.pretrained) == bool(self.config):
            raise ConfigError("`model` needs either `pretrained`, a folder, or `config`, a table")

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        size: int = library_config(self).vocab_size
        return size

    def with_layers(self, num_layers: int) -> "LibraryConfig":
        """The same model with its first layers alone."""
        described = library_config(self)
        described.num_hidden_layers = num_layers
        if getattr(described, "layer_types", None):
            described.layer_types = described.layer_types[:num_layers]
        return LibraryConfig(config=described.to_dict(), lora=self.lora)


def library_config(model: LibraryConfig) -> Any:
    """The `PretrainedConfig` that the model is built from.

    Raises:
        ConfigError: transformers is not installed, or does not know the model, or there is no
            readable configuration.
    """
    # It takes seconds, and only these models need it.
    try:
        from transformers import AutoConfig  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "a model of transformers needs that library: pip install 'gyre-ml[trainer,huggingface]'"
        ) from error

    where = model.pretrained or "`model.config`"
    keys = dict(_table(Path(model.pretrained)) if model.pretrained else model.config)
    kind = keys.pop("model_type", None)
    if not isinstance(kind, str):
        raise ConfigError(f"{where} has no `model_type`, the name of the family, such as llama")
    try:
        return AutoConfig.for_model(kind, **keys)
    except Exception as error:  # each family checks its own keys
        raise ConfigError(f"{where} is no configuration for transformers: {error}") from error


def library_model(model: LibraryConfig) -> nn.Module:
    """The model in float32, on torch's current default device.

    Raises:
        ConfigError: as `library_config`; or the family has no causal language model, or its
            configuration makes none.
    """
    described = library_config(model)
    # It takes seconds, and only these models need it.
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )

    where, kind = model.pretrained or "`model.config`", described.model_type
    if type(described) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{where}: transformers has no causal language model of a {kind}, and gyre-train "
            f"trains no other; {_BY_SCRIPT}"
        )
    try:
        make: Any = AutoModelForCausalLM.from_config
        built = make(described, dtype=torch.float32)
    except Exception as error:  # each family checks its own keys
        raise ConfigError(
            f"{where}: transformers makes no causal language model of this {kind}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    key = "causal" if hasattr(built.config, "causal") else "is_decoder"
    if type(described) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(built.config, key):
        raise ConfigError(
            f"{where}: a {kind} sees the tokens that it is to predict, unless its configuration "
            f"has {key} = true, and gyre-train trains causal language models alone; set that, or "
            f"{_BY_SCRIPT}"
        )
    return cast("nn.Module", built)


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The list of the model's layers: the outermost one that is as long as its configuration says.

    Raises:
        ConfigError: there is none.
    """
    num_layers = model.config.num_hidden_layers  # type: ignore[union-attr]
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ConfigError(f"{type(model).__name__} has no list of {num_layers} layers")


def _table(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}; name a folder with config.json, or that file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{file} is not a table")
    return table
