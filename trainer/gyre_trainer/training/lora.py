"""Low-rank adapters (LoRA) in a language model, by peft; all else is frozen."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import nn

from gyre_trainer.errors import ConfigError
from gyre_trainer.rotation.rotated_module import own_class
from gyre_trainer.training.config_file import AtLeast0

_ADAPTER = "default"  # as peft calls the only one


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021), in peft's words and defaults; rank 0 is for none."""

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


def adapt(model: nn.Module, lora: Lora, seed: int, base: str = "") -> None:
    """Put adapters into a model, in place; all other parameters are frozen.

    The model computes the same as before, because one matrix of each adapter begins as 0.

    Args:
        model: with values; rotated or not.
        lora: rank above 0.
        seed: of the other matrices, the same on all ranks.
        base: the folder of the model's own weights, which exports note; "" for none.

    Raises:
        ConfigError: peft is not installed, or the model has none of the targets.
    """
    # It takes seconds, and only these runs need it.
    try:
        import peft  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "`model.lora` needs peft, which is not installed. "
            "Run pip install 'gyre-ml[trainer,transformers]'."
        ) from error
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # a scale, which need not be whole
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or None,
        base_model_name_or_path=base or None,
        task_type="CAUSAL_LM",
    )
    named = ", ".join(lora.targets) or "layers by itself"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(settings, model, _ADAPTER)
        except ValueError as error:
            raise ConfigError(
                f"`model.lora`: peft takes no {named} in {own_class(model).__name__}: "
                f"{str(error).splitlines()[0]}; name layers in `model.lora.targets`"
            ) from error
