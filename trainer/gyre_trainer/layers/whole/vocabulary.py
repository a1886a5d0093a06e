"""A model that rotates keeps the size of its vocabulary."""

from functools import partial
from typing import Any

from torch import nn

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.guard import own_class


def fix_vocabulary(model: nn.Module) -> None:
    """Let `resize_token_embeddings` of transformers refuse to change a model whose parts rotate."""
    for module in model.modules():
        resize = getattr(module, "resize_token_embeddings", None)
        if resize is not None and not isinstance(resize, partial):
            vars(module)["resize_token_embeddings"] = partial(_resized, module)


def _resized(
    module: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **_: Any
) -> nn.Module:
    """The embedding, if it has this size already.

    Raises:
        RotationError: it has not.
    """
    embedding: nn.Module = module.get_input_embeddings()
    size = embedding.get_parameter("weight").shape[0]
    if new_num_tokens in (None, size) and not pad_to_multiple_of:
        return embedding
    raise RotationError(
        f"{own_class(module).__name__} was rotated with an embedding of {size} tokens, of which "
        f"each rank has its shard, so resize_token_embeddings({new_num_tokens}) cannot change it. "
        "Resize the model first, then rotate it."
    )
