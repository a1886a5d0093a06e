"""The state of a model and its optimizer in a folder, which each rank writes and reads in part."""

import os

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer


def save_states(model: nn.Module, optimizer: Optimizer, folder: str | os.PathLike[str]) -> None:
    """Write both states; collective. Any number of ranks can load them."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_states(model: nn.Module, optimizer: Optimizer, folder: str | os.PathLike[str]) -> None:
    """Restore both states in place; collective."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def save_optimizer(model: nn.Module, optimizer: Optimizer, folder: str | os.PathLike[str]) -> None:
    """Write the optimizer's state; collective. Any number of ranks can load it."""
    save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)


def load_optimizer(model: nn.Module, optimizer: Optimizer, folder: str | os.PathLike[str]) -> None:
    """Restore the optimizer's state in place; collective."""
    state = get_optimizer_state_dict(model, optimizer)
    load({"optimizer": state}, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state)
