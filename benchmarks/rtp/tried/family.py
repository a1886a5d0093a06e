"""A family of `transformers` that rotation is tried on, at toy width."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.rtp.tried.arguments import KINDS
from benchmarks.rtp.tried.sizes import VOCABULARY, Arguments

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "d_model": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 32,
    "image_size": 8,
    "patch_size": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS: dict[str, Any] = {"num_heads": 4, "num_layers": 2}
_NO_DROPOUT = ("drop", "noise", "jitter")  # parts of the names of settings that draw random numbers


@dataclass(frozen=True)
class Family:
    """A family: its class, its sizes, and how it is called.

    Attributes:
        model: the class's name.
        sizes: of its configuration, beside the common ones.
        kind: the kind of arguments, a key of `KINDS`.
        alike: whether all ranks get the same rows, because the loss is none of single rows.
        generates: whether it writes text.
        config: the name of its configuration; None for that of its class.
        single: whether its code takes float32 alone.
        whole: paths of modules that must stay whole, because a forward writes to their parameters.
    """

    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    kind: str = "text"
    alike: bool = False
    generates: bool = False
    config: str | None = None
    single: bool = False
    whole: tuple[str, ...] = ()

    def made(self, dtype: torch.dtype) -> Any:
        """A tiny model, in training, with biases that are not zero; float32 where that is all."""
        import transformers  # noqa: PLC0415

        library: Any = transformers
        torch.manual_seed(0)
        model = getattr(library, self.model)(self.configured())
        for parameter in model.parameters():
            if not (parameter.is_meta or parameter.any()):
                nn.init.normal_(parameter, std=0.1)
        is_single = self.single or dtype == torch.float32
        return (model if is_single else model.to(dtype)).train()

    def arguments(self) -> Arguments:
        """Its arguments: rows of all ranks together."""
        return KINDS[self.kind](self.configured(), torch.Generator().manual_seed(1))

    def configured(self) -> Any:
        """The configuration: common sizes where it has them, and nothing random."""
        kind = self.config_class()
        known = {*inspect.signature(kind.__init__).parameters, *kind.attribute_map}
        names = {kind.attribute_map.get(name, name) for name in self.sizes} | set(self.sizes)
        sizes = {
            name: value
            for name, value in _COMMON.items()
            if name in known and kind.attribute_map.get(name, name) not in names
        }
        config = kind(**sizes | self.sizes)
        _without_chance(config)
        return config

    def config_class(self) -> Any:
        """The class of its configuration."""
        import transformers  # noqa: PLC0415

        library: Any = transformers
        if self.config:
            return getattr(library, self.config)
        return getattr(library, self.model).config_class


def causal(
    name: str,
    config: str | None = None,
    *,
    single: bool = False,
    whole: tuple[str, ...] = (),
    **sizes: Any,
) -> Family:
    model = f"{name}ForCausalLM"
    return Family(model, sizes, generates=True, config=config, single=single, whole=whole)


def masked(name: str, **sizes: Any) -> Family:
    return Family(f"{name}ForMaskedLM", sizes)


def seq2seq(name: str, *, single: bool = False, **sizes: Any) -> Family:
    return Family(f"{name}ForConditionalGeneration", sizes, generates=True, single=single)


def image(name: str, *, alike: bool = False, **sizes: Any) -> Family:
    return Family(f"{name}ForImageClassification", sizes, "image", alike=alike)


def seeing(name: str, kind: str = "seeing", **sizes: Any) -> Family:
    return Family(f"{name}ForConditionalGeneration", sizes, kind, generates=True)


def _without_chance(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if any(part in name for part in _NO_DROPOUT) and type(value) is float:
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            _without_chance(value)
