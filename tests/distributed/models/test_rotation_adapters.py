"""peft's adapters on a rotated model: exact, few bytes, and saved by peft itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.rotate import RotationPolicy, causal_loss, rotate_all
from gyre_trainer.rotation.rule import Rule
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.refused_modules import told
from tests.distributed.training import bytes_of_embedding

Rules = dict[type[nn.Module] | str, Rule | None]
NUM_STEPS = 3
PLAIN = RotationPolicy()
SIZES = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "vocab_size": 60}


def llama(*, biased: bool = False) -> Any:
    import transformers  # seconds, for these tests alone

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    library: Any = transformers
    config = library.LlamaConfig(use_cache=False, attention_bias=biased, **SIZES, **heads)
    return library.LlamaForCausalLM(config).double()


def adapted(model: nn.Module, kind: str) -> Any:
    """The model with adapters whose values matter from the first step on."""
    import peft

    torch.manual_seed(1)
    if kind == "ia3":
        settings: Any = peft.IA3Config(
            target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]
        )
    else:
        settings = peft.LoraConfig(
            r=3,
            target_modules=["q_proj", "v_proj", "up_proj"],
            init_lora_weights=False,
        )
    return peft.get_peft_model(model, settings, autocast_adapter_dtype=False)


def tokens(step: int) -> Tensor:
    return torch.randint(60, (12, 7), generator=torch.Generator().manual_seed(step))


def trained(model: Any, part: int, num_parts: int) -> tuple[list[float], dict[str, Tensor]]:
    """This part's losses, and the adapters afterwards."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        rows = tokens(step).chunk(num_parts)[part]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    adapters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return losses, adapters


def trained_on_the_ring(
    kind: str, order: str, policy: RotationPolicy = PLAIN, replicate: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    mesh, model = make_mesh("cpu", replicate=replicate), llama()
    if order == "rotated, then adapted":
        rotate_all(model, mesh=mesh, policy=policy, find_blocks=False)
        model = adapted(model, kind)
    else:
        model = adapted(model, kind)
        rotate_all(model, mesh=mesh, policy=policy)
    return trained(model, ring_of(mesh).part, mesh.size())


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("lora", "adapted, then rotated"),
        ("lora", "rotated, then adapted"),
        ("ia3", "adapted, then rotated"),
        ("ia3", "rotated, then adapted"),
    ],
)
def test_adapters_train_as_in_one_process(
    ranks: StartRanks, num_ranks: int, kind: str, order: str
) -> None:
    require_as_in_one_process(kind, ranks(num_ranks).run(trained_on_the_ring, kind, order))


def require_as_in_one_process(
    kind: str, found: Sequence[tuple[list[float], dict[str, Tensor]]]
) -> None:
    losses, adapters = trained(adapted(llama(), kind), 0, 1)
    means = [
        sum(of_step) / len(found) for of_step in zip(*(each for each, _ in found), strict=True)
    ]
    assert means == pytest.approx(losses, rel=1e-6)
    for _, parameters in found:
        assert parameters.keys() == adapters.keys()
        for name, expected in adapters.items():
            torch.testing.assert_close(parameters[name], expected, rtol=1e-4, atol=1e-7)


def bytes_of_a_step(rules: Rules | None = None) -> int:
    mesh = make_mesh("cpu")
    model = adapted(llama(), "lora")
    rotate_all(model, mesh=mesh, rules=rules, verify=False)  # which gathers what has a rule
    ring = ring_of(mesh)
    rows = tokens(0).chunk(mesh.size())[dist.get_rank()]
    batch = {"input_ids": rows, "labels": rows}
    torch.autograd.backward(causal_loss(model, batch))  # which compares once
    before = ring.bytes_sent
    torch.autograd.backward(causal_loss(model, batch))
    return ring.bytes_sent - before


def test_frozen_weights_travel_without_gradients(ranks: StartRanks) -> None:
    linears = {
        name: module.weight.numel()
        for name, module in llama().named_modules()
        if isinstance(module, nn.Linear)
    }
    shape = SIZES["vocab_size"], SIZES["hidden_size"]
    # before the first adapter nothing needs a gradient, so nothing travels in backward; and the
    # gradient of the head's input is known after forward
    early = ["lm_head", *(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")]
    forward = sum(linears.values())
    backward = sum(linears.values()) - sum(linears[name] for name in early)
    for num_ranks in (2, 3):
        expected = 8 * (forward + backward) * (num_ranks - 1) // num_ranks
        rows = tokens(0).chunk(num_ranks)
        assert ranks(num_ranks).run(bytes_of_a_step) == [
            expected + bytes_of_embedding(rows, rank, shape, weight=8, grad=0)
            for rank in range(num_ranks)
        ]


def saved(path: Path) -> Tensor:
    mesh = make_mesh("cpu")
    model = adapted(llama(), "lora")
    rotate_all(model, mesh=mesh)
    trained(model, dist.get_rank(), mesh.size())
    model.save_pretrained(path, is_main_process=dist.get_rank() == 0)
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens(0)).logits
    return logits


def test_peft_saves_and_loads_what_was_trained(ranks: StartRanks, tmp_path: Path) -> None:
    import peft

    found = ranks(2).run(saved, tmp_path)
    model = peft.PeftModel.from_pretrained(llama(), str(tmp_path), autocast_adapter_dtype=False)
    with torch.no_grad():
        expected = model(input_ids=tokens(0)).logits
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-7)


def magnitudes() -> None:
    import peft

    settings: Any = peft.LoraConfig(target_modules=["0"], use_dora=True)
    model: Any = peft.get_peft_model(nn.Sequential(nn.Linear(6, 4)), settings)
    rotate_all(model, mesh=make_mesh("cpu"))


def adapters_inside_a_block() -> None:
    model = llama()
    rotate_all(model, mesh=make_mesh("cpu"), find_blocks=True)
    adapted(model, "lora")(input_ids=tokens(0))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (magnitudes, ["reads the weights of its layer", "use_dora=False"]),
        (adapters_inside_a_block, ["after it was rotated", "adapters", "Change the model first"]),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(
    ranks: StartRanks, program: Any, words: list[str]
) -> None:
    for found in ranks(2).run(told, program):
        assert all(word in found for word in words), found
