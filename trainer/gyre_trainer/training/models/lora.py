"""Low-rank adapters (LoRA) in a causal language model, by peft; all else is frozen."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import nn

from gyre_trainer.errors import CheckpointFailed, ConfigError
from gyre_trainer.training.configuration.ranges import AtLeast0

_ADAPTER = "default"  # as peft calls the only one


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021); peft's words and defaults.

    Attributes:
        rank: R of the two matrices [R, D_in] and [D_out, R]; 0 for no adapters.
        alpha: their product is scaled by alpha / rank.
        dropout: of their input.
        targets: the last parts of the names of linear layers that get adapters, such as
            "q_proj"; none for what peft chooses for the family.
    """

    rank: AtLeast0 = 0
    alpha: Annotated[float, Meta(gt=0)] = 8.0
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    targets: tuple[str, ...] = ()


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
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(_settings(lora), model, _ADAPTER)
        except ValueError as error:
            raise ConfigError(f"`model.lora`: {str(error).splitlines()[0]}") from error


def save_adapters(model: nn.Module, lora: Lora, base: str, folder: Path) -> None:
    """Write the adapters as peft does; called by one rank.

    Args:
        model: with adapters.
        lora: what they are.
        base: the folder of the model's own weights, which is noted.
        folder: where `adapter_model.safetensors` and `adapter_config.json` go; it may exist.

    Raises:
        CheckpointFailed: a file cannot be written.
    """
    # It comes with transformers, which only these models need.
    from safetensors.torch import save_file  # noqa: PLC0415

    values = _peft().get_peft_model_state_dict(model, adapter_name=_ADAPTER)
    settings = _settings(lora)
    settings.base_model_name_or_path, settings.inference_mode = base, True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # peft loads into a model of its own, which holds the model under this name
        tensors = {f"base_model.model.{name}": each.contiguous() for name, each in values.items()}
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        settings.save_pretrained(str(folder))
    except OSError as error:
        raise CheckpointFailed(f"{folder} cannot be written: {error.strerror}") from error


def _settings(lora: Lora) -> Any:
    return _peft().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or None,
        task_type="CAUSAL_LM",
    )


def _peft() -> Any:
    # It takes seconds, and only these runs need it.
    try:
        import peft  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "`model.lora` needs peft: pip install 'gyre-ml[trainer,huggingface,lora]'"
        ) from error
    return peft
