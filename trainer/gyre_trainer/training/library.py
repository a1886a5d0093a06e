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
from gyre_trainer.shards.tensor_files import read_regular
from gyre_trainer.training.lora import Lora

_BY_SCRIPT = (
    'train it by a script with rotate_all, as docs/rotate.md describes under "Your own model", or '
    "in Hugging Face's Trainer with ShardedTrainer"
)


@dataclass(frozen=True, slots=True)
class LibraryConfig:
    """A model of `transformers`, by its folder or by the keys of its configuration."""

    pretrained: str = ""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lora: Lora = dataclasses.field(default_factory=Lora)

    def __post_init__(self) -> None:
        if bool(self.pretrained) == bool(self.config):
            raise ConfigError("`model` needs either `pretrained`, a folder, or `config`, a table")

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        size: int = text_config(library_config(self)).vocab_size
        return size

    def with_layers(self, num_layers: int) -> "LibraryConfig":
        """The same model with its first layers alone."""
        described = library_config(self)
        text = text_config(described)
        setattr(text, _depth_key(text), num_layers)
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:num_layers]
        return dataclasses.replace(self, pretrained="", config=described.to_dict())


def library_config(model: LibraryConfig) -> Any:
    """The `PretrainedConfig` that the model is built from.

    Raises:
        ConfigError: transformers is not installed, or does not know the model, or there is no
            readable configuration.
    """
    # It takes seconds, and only these models need it.
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, __version__  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "`model` needs transformers, which is not installed. "
            "Run pip install 'gyre-ml[trainer,transformers]'."
        ) from error

    where = model.pretrained or "`model.config`"
    keys = dict(_table(Path(model.pretrained)) if model.pretrained else model.config)
    kind = keys.pop("model_type", None)
    if not isinstance(kind, str):
        raise ConfigError(f"{where} has no `model_type`, the name of the family, such as llama")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"{where}: transformers {__version__} has no `model_type` {kind!r}")
    try:
        return AutoConfig.for_model(kind, **keys)
    except Exception as error:  # each family checks its own keys
        raise ConfigError(f"{where} is no configuration for transformers: {error}") from error


def text_config(described: Any) -> Any:
    """The part of a configuration that describes the language model; mostly all of it.

    Beside a tower of images it is the text's, and of T5Gemma the decoder's.
    """
    if not described.is_encoder_decoder:
        return described.get_text_config()
    decoder = getattr(described, "decoder", None)
    return decoder if hasattr(decoder, "num_hidden_layers") else described


def library_model(model: LibraryConfig) -> nn.Module:
    """The model in float32, on torch's current default device.

    Raises:
        ConfigError: as `library_config`; or the family has no causal language model, or its
            configuration makes none.
    """
    # It takes seconds, and only these models need it.
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    described = library_config(model)
    where, kind = model.pretrained or "`model.config`", described.model_type
    has_causal = type(described) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    architecture = (getattr(described, "architectures", None) or [""])[0]
    is_pair = described.is_encoder_decoder and not architecture.endswith("ForCausalLM")
    if is_pair or not has_causal:
        raise ConfigError(
            f"{where}: gyre-train trains causal language models, and a {kind} is "
            f"{'an encoder-decoder' if is_pair else 'none'}; {_BY_SCRIPT}"
        )
    try:
        make: Any = AutoModelForCausalLM
        built = make.from_config(described, dtype=torch.float32)
    except Exception as error:  # each family checks its own keys
        raise ConfigError(
            f"{where}: transformers makes no causal language model of this {kind}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    is_masked = type(described) in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING
    causal_key = "causal" if hasattr(described, "causal") else "is_decoder"
    if is_masked and not getattr(built.config, causal_key, False):
        raise ConfigError(
            f"{where}: a {kind} sees the tokens that it is to predict (masked models are not "
            f"trained by gyre-train). Set {causal_key} = true in its configuration, or "
            f"{_BY_SCRIPT}."
        )
    return cast("nn.Module", built)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The model's layers: those of the outermost list as long as its configuration says.

    Raises:
        ConfigError: there is no such list.
    """
    library: Any = model
    text = text_config(library.config)
    # next to a tower of images, whose list may be as long
    inside = model if text is library.config else library.get_decoder()
    num_layers = getattr(text, _depth_key(text), 0)
    for module in inside.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise ConfigError(f"{type(inside).__name__} has no list of {num_layers} layers")


def _depth_key(text: Any) -> str:
    """The key with the number of layers: the decoder's, also where the decoder stands alone."""
    names = ("num_decoder_layers", "decoder_layers")
    return next((name for name in names if hasattr(text, name)), "num_hidden_layers")


def _table(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        table = json.loads(read_regular(file))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}; name a folder with config.json, or that file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{file} is not a table")
    return table
