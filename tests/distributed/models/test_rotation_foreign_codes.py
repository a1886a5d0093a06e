"""Models that torchao or bitsandbytes has quantized rotate with the codes that these have made."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import rotate_all
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole

WIDTH = 128  # torchao's nf4 takes multiples of 64 * 256 elements
# Bytes of a row: codes, scales, and the bias of the first layer.
ROW = {"int8": WIDTH + 4, "nf4": WIDTH // 2 + 8, "bitsandbytes": WIDTH // 2 + 8}

pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None or find_spec("bitsandbytes") is None,
    reason="needs torchao and bitsandbytes: make test-models",
)


def quantized(kind: str, *, nested: bool = False) -> nn.Sequential:
    """Two frozen layers of codes, and a norm that trains between them."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)]
    for layer in layers:
        layer.requires_grad_(False)
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        for layer in layers:
            quantize_(layer, Int8WeightOnlyConfig())
    elif kind == "nf4":
        from torchao.quantization import to_nf4

        for layer in layers:
            layer.weight = nn.Parameter(to_nf4(layer.weight.detach()), requires_grad=False)
    else:
        layers = [of_bitsandbytes(layer, kind, nested=nested) for layer in layers]
    return nn.Sequential(layers[0], nn.LayerNorm(WIDTH), layers[1])


def of_bitsandbytes(layer: nn.Linear, kind: str, *, nested: bool) -> Any:
    import bitsandbytes

    library: Any = bitsandbytes.nn
    biased = layer.bias is not None
    if kind == "of 8 bits":
        made = library.Linear8bitLt(WIDTH, WIDTH, biased, has_fp16_weights=False)
    else:
        made = library.Linear4bit(
            WIDTH, WIDTH, biased, torch.float32, compress_statistics=nested, quant_type="nf4"
        )
    made.load_state_dict(layer.state_dict())
    return made.to("cpu").requires_grad_(False)


def trained(model: nn.Module, part: int, num_parts: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The last output of this part, and the norm afterwards."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))
        output = model(x.chunk(num_parts)[part])
        (output - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    norm = {n: whole(p.detach()) for n, p in model.named_parameters() if p.requires_grad}
    return output.detach(), norm


def on_the_ring(kind: str) -> tuple[Tensor, dict[str, Tensor], int, set[Any]]:
    mesh, model = make_mesh("cpu"), quantized(kind)
    rotate_all(model, mesh=mesh)
    ring = ring_of(mesh)
    before = ring.bytes_sent
    found = trained(model, ring.part, mesh.size())
    dtypes = {layer._parameters["weight"].dtype for layer in (model[0], model[2])}  # type: ignore[union-attr]
    return *found, ring.bytes_sent - before, dtypes


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("kind", ["int8", "nf4", "bitsandbytes"])
def test_their_codes_travel_and_results_are_theirs(
    ranks: StartRanks, kind: str, num_ranks: int
) -> None:
    output, norm = trained(quantized(kind), 0, 1)
    outcomes = ranks(num_ranks).run(on_the_ring, kind)
    torch.testing.assert_close(
        torch.cat([each for each, *_ in outcomes]), output, rtol=1e-4, atol=1e-5
    )
    for _, found, _, dtypes in outcomes:
        assert dtypes == {torch.uint8}
        for name, expected in norm.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5)
    # three steps; the first layer's input takes no gradient, so it travels in forward alone
    rows = 3 * (num_ranks - 1) * WIDTH
    sent = rows * (ROW[kind] + 4) + 2 * rows * ROW[kind]
    assert sum(each for _, _, each, _ in outcomes) == sent


def refusal(kind: str) -> str:
    model = quantized("bitsandbytes" if kind == "trains" else kind, nested=kind == "nested")
    if kind == "trains":
        model[0].bias.requires_grad_()
    try:
        rotate_all(model, mesh=make_mesh("cpu"))
    except RotationError as error:
        return str(error)
    return f"nothing was refused on rank {dist.get_rank()}"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nested", ["scales", "bnb_4bit_use_double_quant=False"]),
        ("of 8 bits", ["Int8Params of bitsandbytes", "quantize_frozen"]),
        ("trains", ["Linear4bit", "bitsandbytes", "trains", "requires_grad_(False)"]),
    ],
)
def test_other_codes_are_refused(ranks: StartRanks, kind: str, words: list[str]) -> None:
    for found in ranks(2).run(refusal, kind):
        assert all(word in found for word in words), found
