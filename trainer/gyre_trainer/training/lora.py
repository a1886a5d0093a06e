"""Low-rank adapters (LoRA) in a language model, by peft; all else is frozen."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import nn

from gyre_trainer.errors import CheckpointFailed, CheckpointRejected, ConfigError
from gyre_trainer.rotation.rotated_module import own_class
from gyre_trainer.shards.tensor_files import open_regular, read_regular
from gyre_trainer.training.config_file import AtLeast0

_ADAPTER = "default"  # as peft calls the only one
_WEIGHTS, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."  # of names in the file


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021); peft's words and defaults.

    Attributes:
        rank: R of the two matrices [R, D_in] and [D_out, R]; 0 for no adapters.
        alpha: their product is scaled by alpha / rank.
        dropout: of their input.
        targets: the last parts of the names of linear layers that get adapters, such as
            "q_proj"; none for peft's choice for the family.
        frozen: how frozen matrices rest: in float32 or bfloat16; or linear layers in int8 or nf4,
            in which they travel, too. Adapters are float32.
    """

    rank: AtLeast0 = 0
    alpha: Annotated[float, Meta(gt=0)] = 8.0
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    targets: tuple[str, ...] = ()
    frozen: Literal["bfloat16", "float32", "int8", "nf4"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.encodes and not self.rank:
            raise ConfigError(
                f"`model.lora.frozen` is {self.frozen}, but `model.lora.rank` is 0, so nothing is "
                "frozen; set a rank, or leave `frozen` out"
            )

    @property
    def encodes(self) -> bool:
        """Whether frozen linear layers rest in few bits."""
        return self.frozen in ("int8", "nf4")


def adapt(model: nn.Module, lora: Lora, seed: int) -> None:
    """Put adapters into a model, in place; all other parameters are frozen.

    The model computes the same as before, because one matrix of each adapter begins as 0.

    Args:
        model: with values; rotated or not.
        lora: rank above 0.
        seed: of the other matrices, the same on all ranks.

    Raises:
        ConfigError: peft is not installed, or the model has none of the targets.
    """
    peft = _peft()
    named = ", ".join(lora.targets) or "layers by itself"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(_settings(lora), model, _ADAPTER)
        except ValueError as error:
            raise ConfigError(
                f"`model.lora`: peft takes no {named} in {own_class(model).__name__}: "
                f"{str(error).splitlines()[0]}; name layers in `model.lora.targets`"
            ) from error


def save_adapters(model: nn.Module, lora: Lora, base: str, folder: Path) -> None:
    """Write the adapters as peft does; called by one rank.

    Args:
        model: with adapters.
        lora: their settings.
        base: the folder of the model's own weights, which is noted; "" for none.
        folder: where `adapter_model.safetensors` and `adapter_config.json` go; it may exist.

    Raises:
        CheckpointFailed: a file cannot be written.
    """
    # It comes with transformers, which only these models need.
    from safetensors.torch import save_file  # noqa: PLC0415

    values = _peft().get_peft_model_state_dict(model, adapter_name=_ADAPTER)
    settings = _settings(lora)
    settings.base_model_name_or_path, settings.inference_mode = base or None, True
    settings.task_type = "CAUSAL_LM"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # peft loads into a model of its own, which holds the model under this name
        tensors = {f"{_PREFIX}{name}": each.contiguous() for name, each in values.items()}
        save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
        settings.save_pretrained(str(folder))
    except OSError as error:
        raise CheckpointFailed(f"{folder} cannot be written: {error.strerror}") from error


def holds_adapters(folder: Path) -> bool:
    """Whether there are adapters in a folder, as `save_adapters` or peft writes them."""
    return (folder / _WEIGHTS).exists()


def load_adapters(model: nn.Module, lora: Lora, folder: Path) -> None:
    """Copy the adapters in a folder into those of a model.

    Raises:
        CheckpointRejected: they are others, or damaged; the message names the difference.
    """
    # It comes with transformers, which only these models need.
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    try:
        with open_regular(folder / _WEIGHTS):  # the library would wait for a pipe
            found = load_file(folder / _WEIGHTS)
        alpha = json.loads(read_regular(folder / _SETTINGS))["lora_alpha"]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointRejected(f"the adapters in {folder} cannot be read: {error}") from error
    values = {name.removeprefix(_PREFIX): each for name, each in found.items()}
    wanted = _peft().get_peft_model_state_dict(model, adapter_name=_ADAPTER)
    there, here = ({name: list(each.shape) for name, each in of.items()} for of in (values, wanted))
    different = sorted(name for name in there | here if there.get(name) != here.get(name))
    if different:
        name = different[0]
        raise CheckpointRejected(
            f"the adapters in {folder} are others than `model.lora` says: {name} has the shape "
            f"{there.get(name, 'of nothing')} there and {here.get(name, 'of nothing')} here"
        )
    if alpha != lora.alpha:
        raise CheckpointRejected(
            f"the adapters in {folder} have alpha {alpha}, but `model.lora` has {lora.alpha}"
        )
    _peft().set_peft_model_state_dict(model, values, adapter_name=_ADAPTER)


def _settings(lora: Lora) -> Any:
    return _peft().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or None,
    )


def _peft() -> Any:
    # It takes seconds, and only these runs need it.
    try:
        import peft  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "`model.lora` needs peft, which is not installed. "
            "Run pip install 'gyre-ml[trainer,transformers]'."
        ) from error
    return peft
