"""Rotated models in training loops with accelerate.

The state of a model and its optimizer in a folder, which each rank writes and reads in part.
"""

import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from gyre_trainer.errors import RotationError
from gyre_trainer.optimizers.shard import keep_saved_states


def save_states(model: nn.Module, optimizer: Optimizer, folder: str | os.PathLike[str]) -> None:
    """Write both states; collective. Any number of ranks can load them."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_states(model: nn.Module, optimizer: Optimizer, folder: str | os.PathLike[str]) -> None:
    """Restore both states in place; collective."""
    _keep_saved(model, optimizer, folder)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=_SOME_WITHOUT,
    )


def save_optimizer(model: nn.Module, optimizer: Optimizer, folder: str | os.PathLike[str]) -> None:
    """Write the optimizer's state; collective. Any number of ranks can load it."""
    save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)


def load_optimizer(model: nn.Module, optimizer: Optimizer, folder: str | os.PathLike[str]) -> None:
    """Restore the optimizer's state in place; collective."""
    _keep_saved(model, optimizer, folder)
    state = get_optimizer_state_dict(model, optimizer)
    load({"optimizer": state}, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state, options=_SOME_WITHOUT)


# Parameters without a gradient yet have no state; names that a checkpoint lacks are refused before.
_SOME_WITHOUT = StateDictOptions(strict=False)


def _keep_saved(model: nn.Module, optimizer: Optimizer, folder: str | os.PathLike[str]) -> None:
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    keep_saved_states(model, [optimizer], saved)


_FOLDER = "sharded_{}"


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """`Accelerator.prepare` for a model that is rotated, or sharded by FSDP2.

    Afterwards `accumulate`, `backward`, `clip_grad_norm_`, `save_state` and `load_state` work as
    for other models. Each rank writes its shards, and any number of ranks can load them. Give
    loaders and schedules to `Accelerator.prepare`.

    Raises:
        RotationError: the accelerator has a `mixed_precision`, which is for whole weights.

    Example:
        rotate_all(model, mesh=make_mesh(accelerator.device.type))
        model, optimizer = prepare(accelerator, model, torch.optim.AdamW(model.parameters()))
        accelerator.backward(causal_loss(model, batch))  # of gyre_trainer.rotate
    """
    if accelerator.mixed_precision != "no":
        raise RotationError(
            f"Accelerator(mixed_precision={accelerator.mixed_precision!r}): "
            'take "no", and RotationPolicy(compute_dtype=torch.bfloat16)'
        )
    # evaluation_mode leaves the model as it is: no DistributedDataParallel around it
    prepared: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
    name = _FOLDER.format(len(accelerator._models) - 1)

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        # the rest of the list is written by the first rank alone
        weights.pop([id(each) for each in models].index(id(prepared)))
        save_states(prepared, optimizer, Path(folder) / name)

    def load(models: list[nn.Module], folder: str) -> None:
        models.pop([id(each) for each in models].index(id(prepared)))
        load_states(prepared, optimizer, Path(folder) / name)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    # not known to the accelerator, whose first rank would save its own shards of the state
    return prepared, AcceleratedOptimizer(optimizer, device_placement=False)
