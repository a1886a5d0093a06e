"""Adapters of peft in its own layout: `adapter_model.safetensors` and `adapter_config.json`.

Each adapter of a `PeftModel` has a folder: "default" the given one, others one below it with their
name. Adapters are whole on every rank, or sharded as other parameters are, such as those of
`modules_to_save`; a rank reads and writes its own part of them.
"""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gyre_trainer.errors import CheckpointRejected, RotationError
from gyre_trainer.rotation.rotated_module import own_class
from gyre_trainer.shards.stored_weights import (
    Target,
    agreed,
    joined,
    read_targets,
    stored_dtype,
    targets_of,
    write_targets,
)
from gyre_trainer.shards.tensor_files import layout_of, read_header

_WEIGHTS = "adapter_model.safetensors"


def is_adapted(model: nn.Module) -> bool:
    """Whether this is a `PeftModel`; peft may not be installed."""
    return any(
        (each.__module__, each.__name__) == ("peft.peft_model", "PeftModel")
        for each in type(model).__mro__
    )


def has_adapters(folder: Path) -> bool:
    """Whether a folder has the weights of adapters, in itself or one level below."""
    return (folder / _WEIGHTS).exists() or any(folder.glob(f"*/{_WEIGHTS}"))


def load_adapters(model: nn.Module, folder: Path) -> None:
    """Copy the weights of all adapters of a `PeftModel` into it; collective.

    Raises:
        CheckpointRejected: on every rank: a file is missing, damaged, or of other adapters.
    """
    with agreed("loading adapters"):
        for name in _names(model):
            path = _folder(folder, name) / _WEIGHTS
            stored, targets = read_header(path), _targets(model, name)
            unknown = sorted(stored.keys() - {each.names[0] for each in targets})
            if unknown:
                raise CheckpointRejected(
                    f"{path} has {unknown[0]}, which the adapter {name!r} does not have. Load it "
                    "into a model with the adapters that it was saved from."
                )
            read_targets(targets, stored, path)


def save_adapters(model: nn.Module, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write all adapters of a `PeftModel`, so that `PeftModel.from_pretrained` loads them.

    Collective. The weights below the adapters are not written, as in peft.

    Raises:
        CheckpointFailed: on every rank: a file could not be written.
        RotationError: an adapter makes its weights when it is saved, as prompts do.
    """
    for name in _names(model):
        here, targets = _folder(folder, name), _targets(model, name)
        tensors = [
            (each.names[0], tuple(each.whole.shape), stored_dtype(each.whole, dtype))
            for each in targets
        ]
        files = {_WEIGHTS: layout_of(here / _WEIGHTS, tensors)}
        write_targets(here, joined(targets), files, partial(_describe, model, name, here))


def _names(model: Any) -> list[str]:
    return list(model.peft_config)


def _folder(folder: Path, name: str) -> Path:
    return folder if name == "default" else folder / name


def _targets(model: nn.Module, name: str) -> list[Target]:
    """The tensors of an adapter under the names that they have in its file, one for each name."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415  # seconds, for these models alone

    state = model.state_dict(keep_vars=True)
    own = {id(each) for each in state.values()}
    chosen = get_peft_model_state_dict(model, state_dict=state, adapter_name=name)
    for key, tensor in chosen.items():
        if id(tensor) not in own:
            raise RotationError(
                f"{key} of the adapter {name!r} is no parameter of the model, so it cannot be "
                "saved by shards. Save it by peft's save_pretrained."
            )
    return [target for key in chosen for target in targets_of({key: chosen[key]})]


def _describe(model: Any, name: str, folder: Path) -> None:
    """Write the settings of an adapter and the model's card, as peft does."""
    settings: Any = deepcopy(model.peft_config[name])
    base = model.get_base_model()
    settings.inference_mode = True
    settings.base_model_name_or_path = (
        settings.base_model_name_or_path or vars(base).get("name_or_path") or None
    )
    mapping = None
    if settings.task_type is None:
        kind = own_class(base)
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    settings.save_pretrained(str(folder), auto_mapping_dict=mapping)
    model.create_or_update_model_card(str(folder))
