"""Frozen layers of a rotated model that rest and travel in few bits."""

import warnings
from collections import Counter
from collections.abc import Collection, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.errors import RotationError
from gyre_trainer.inspection.agreement import require_equal_models
from gyre_trainer.layers.encoded.quantized_linear import quantize_linear
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.shards.quantized import Format, require_format


def quantize_frozen(
    model: nn.Module, to: Format, *, mesh: DeviceMesh, keep: Collection[str] = ("lm_head",)
) -> list[str]:
    """Keep and send the frozen linear layers of a rotated model in few bits; collective.

    Each layer that rotates by itself is encoded: a rank's own rows at home, and on their way. A
    slice is decoded on arrival, so results are those of a model with the decoded weights. All other
    weights stay as they are: embeddings, blocks that rotate as a whole, and what is tied. So rotate
    the model with ``find_blocks=False``; a warning names blocks that were left out.

    Args:
        model: rotated, with values, and with frozen weights. Adapters may be there or come later.
        to: "int8", a byte for each weight and 4 for each row, off by at most 1/254 of the largest
            weight of the row; or "nf4", half a byte and 1/16 of a byte, off by at most 0.152 of the
            largest of 64.
        mesh: the mesh of the model.
        keep: the last parts of the paths of layers that stay as they are, such as "lm_head", whose
            loss is taken by slices of the vocabulary.

    Returns:
        The paths of the layers that were encoded.

    Raises:
        RotationError: a layer that is not kept trains or has no finite values yet, or none is
            left, or the ranks differ.

    Example:
        rotate_all(model, mesh=mesh, find_blocks=False)
        pretrained.load(model, path)
        quantize_frozen(model.requires_grad_(False), "nf4", mesh=mesh)
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    """
    require_format(to)
    rotated = {p: each for p, each in model.named_modules() if isinstance(each, RotatedModule)}
    uses = Counter(id(each.rotation.sharded) for each in rotated.values())
    chosen = {
        path: each
        for path, each in rotated.items()
        if type(each.rotation.rule) is LinearRule
        and uses[id(each.rotation.sharded)] == 1
        and path.rpartition(".")[2] not in keep
    }
    if not chosen:
        raise RotationError(
            f"no linear layer of {type(model).__name__} rotates by itself; rotate the model with "
            "find_blocks=False"
        )
    _warn_of_blocks(rotated)
    for path, each in chosen.items():
        quantize_linear(each, path, to)
    require_equal_models(model, mesh)
    return list(chosen)


def _warn_of_blocks(rotated: Mapping[str, RotatedModule]) -> None:
    """Warn where frozen weights are not encoded because their block rotates as a whole."""
    blocks = []
    for path, each in rotated.items():
        names = [cut.name for cut in each.rotation.layout.cuts if len(cut.shape) > 1]
        frozen = not any(each.rotation.module.get_parameter(name).requires_grad for name in names)
        if len(names) > 1 and frozen:
            blocks.append(path)
    if blocks:
        warnings.warn(
            f"{len(blocks)} frozen blocks that rotate as a whole are not encoded, {blocks[0]} the "
            "first of them; rotate the model with find_blocks=False to encode their layers",
            stacklevel=3,
        )
