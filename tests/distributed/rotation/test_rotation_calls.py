"""What a call of a rotated module does around the module's own forward."""

import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.mlp import MLP
from gyre_trainer.rotate import rotate
from torch import nn

from tests.distributed.conftest import StartRanks


def refusal_after(what: str) -> str:
    """What a call of an MLP says whose layer was replaced or lost."""
    mlp = MLP(4, 6)
    rotate(mlp, mesh=make_mesh("cpu"))
    if what == "replaced":
        mlp.up = nn.Sequential(mlp.up)  # type: ignore[assignment]
    elif what == "deleted":
        del mlp.up
    else:
        del mlp.up.weight
    try:
        mlp(torch.ones(2, 4))
    except RotationError as error:
        return str(error)
    return "no error"


def test_a_module_that_was_changed_after_it_was_rotated_is_refused(ranks: StartRanks) -> None:
    refusal = (
        "RotatedMLP was changed after it was rotated, such as by adapters: its parameter "
        "up.weight is gone. Change the model first, then rotate it, or rotate it with "
        "find_blocks=False."
    )
    guarded = "RotatedMLP: the class of up was Linear when it was rotated as one, and is"
    for what in ("replaced", "deleted"):
        (told,) = ranks(1).run(refusal_after, what)
        assert told.startswith(guarded), told
    assert ranks(1).run(refusal_after, "without its weight") == [refusal]
