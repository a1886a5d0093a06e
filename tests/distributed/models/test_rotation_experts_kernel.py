"""Stacked experts of transformers 5 by its own kernel: a slice's are those of one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole

kernels: Any = pytest.importorskip("transformers.integrations.moe")  # of 5.0 and newer
if not hasattr(kernels, "grouped_mm_experts_forward"):
    pytest.skip("this transformers has no such kernel", allow_module_level=True)

VOCABULARY = 31
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,  # torch's grouped products take rows of 16 bytes or a multiple
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_cache": False,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
FAMILIES = ["Mixtral", "Qwen3Moe", "GptOss"]
Distances = dict[str, tuple[float, float]]


def made(family: str, num_experts: int = 5, kernel: str | None = None) -> Any:
    """A tiny model with biases other than zero, by the default kernel of the library."""
    import transformers  # seconds, for these tests alone

    library: Any = transformers
    name = "num_experts" if family == "Qwen3Moe" else "num_local_experts"
    options = SIZES | {name: num_experts}
    if kernel is not None:
        options["experts_implementation"] = kernel
    torch.manual_seed(0)
    model = getattr(library, f"{family}ForCausalLM")(getattr(library, f"{family}Config")(**options))
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def rows() -> Tensor:
    return torch.randint(1, VOCABULARY, (12, 5), generator=torch.Generator().manual_seed(1))


def outcome(model: Any, own: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients of all parameters, that of the embedding by the input's."""
    loss = model(input_ids=own, labels=own).loss
    loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def rotated(model: Any, policy: RotationPolicy = RotationPolicy()) -> None:  # noqa: B008
    """Rotate a model, whose experts do so as one."""
    plan = rotate_all(model, mesh=make_mesh("cpu"), min_numel=0, policy=policy)
    rules = [each.rule for each in plan.entries if each.path.endswith("experts")]
    assert rules == ["ExpertsRule"] * SIZES["num_hidden_layers"], str(plan)


def distance(one: Any, other: Any) -> tuple[float, float]:
    """How far the loss and the gradients of a rotated model are from those of one process."""
    loss, expected = outcome(one, rows())
    mine, found = outcome(other, rows().chunk(dist.get_world_size())[dist.get_rank()])
    dist.all_reduce(mine)
    assert found.keys() == expected.keys()
    counts = {each.num_experts for each in other.modules() if hasattr(each, "_is_expert_parallel")}
    assert counts == {each.num_experts for each in one.modules() if hasattr(each, "has_gate")}
    of_grads = max(apart(found[name].to(expected[name]), expected[name]) for name in expected)
    return apart(mine / dist.get_world_size(), loss), of_grads


def compared(policy: RotationPolicy, num_experts: int) -> Distances:
    found = {}
    for family in FAMILIES:
        one, other = made(family, num_experts), made(family, num_experts)
        rotated(other, policy)
        found[family] = distance(one, other)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("recompute", ["none", "block", "layer"])
def test_experts_that_no_ring_divides_train_exactly(
    ranks: StartRanks, num_ranks: int, recompute: Any
) -> None:
    for each in ranks(num_ranks).run(compared, RotationPolicy(recompute=recompute), 5):
        for family, (loss, grads) in each.items():
            assert loss <= 1e-6, family
            assert grads <= 2e-5, family


def test_fewer_experts_than_ranks_train_exactly(ranks: StartRanks) -> None:
    for each in ranks(3).run(compared, RotationPolicy(), 2):
        assert all(loss <= 1e-6 and grads <= 2e-5 for loss, grads in each.values())


def all_choose_one_slice() -> Distances:
    """With routers of zeros, ties make all tokens choose the same two of six experts."""
    found = {}
    for family in FAMILIES:
        models = made(family, 6), made(family, 6)
        for model in models:
            for name, parameter in model.named_parameters():
                if "router" in name or "mlp.gate." in name:
                    nn.init.zeros_(parameter)
        rotated(models[1])
        found[family] = distance(*models)
        down = "model.layers.0.mlp.experts.down_proj"
        grad = whole(dict(models[1].named_parameters())[down].grad)
        assert 0 < grad.flatten(1).any(1).sum() == 2
    return found


def test_slices_that_no_token_chose_train_exactly(ranks: StartRanks) -> None:
    for each in ranks(3).run(all_choose_one_slice):
        assert all(loss <= 1e-6 and grads <= 2e-5 for loss, grads in each.values())


def in_double() -> Distances:
    """By the library's own product, in place of torch's, which refuses float64."""
    found = {}
    for family in FAMILIES:
        one, other = made(family).double(), made(family).double()
        rotated(other)
        with patch.object(kernels, "_can_use_grouped_mm", lambda *_: False):
            found[family] = distance(one, other)
    return found


def test_float64_by_the_library_own_product(ranks: StartRanks) -> None:
    """It takes norms and the router's softmax in float32 all the same."""
    for each in ranks(3).run(in_double):
        assert all(loss <= 1e-6 and grads <= 1e-5 for loss, grads in each.values())


def in_half() -> Distances:
    """Of losses alone: a token may choose another expert, and so move gradients further."""
    found = {}
    for family in FAMILIES:
        one, other = made(family), made(family)
        rotated(other, RotationPolicy(compute_dtype=torch.bfloat16))
        found[family] = distance(one, other)
    return found


def test_bfloat16_within_rounding(ranks: StartRanks) -> None:
    for each in ranks(2).run(in_half):
        assert all(loss <= 2e-2 for loss, _ in each.values()), each


def beside_adapters() -> Distances:
    """Attention has adapters; experts are frozen."""
    import peft

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        targets = ["q_proj", "v_proj"]
        settings = peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False)
        return peft.get_peft_model(model, settings)

    found = {}
    for family in FAMILIES:
        one, other = adapted(made(family)), adapted(made(family))
        rotated(other)
        found[family] = distance(one, other)
    return found


def test_adapters_next_to_experts_train_exactly(ranks: StartRanks) -> None:
    for each in ranks(2).run(beside_adapters):
        assert all(loss <= 1e-6 and grads <= 2e-5 for loss, grads in each.values()), each


@contextmanager
def refused(text: str) -> Iterator[None]:
    with pytest.raises(RotationError, match=text):
        yield


def switched() -> None:
    model = made("Mixtral")
    rotated(model)
    own = rows()[:4]
    experts = model.model.layers[0].mlp.experts
    table = kernels.ALL_EXPERTS_FUNCTIONS
    eager = patch.object(experts.config, "_experts_implementation", "eager")
    with eager, refused("its experts kernel was 'grouped_mm' when"):
        model(input_ids=own)
    other = patch.dict(table._global_mapping, grouped_mm=kernels.batched_mm_experts_forward)
    with other, refused("kernel's function was grouped_mm_experts_forward when"):
        model(input_ids=own)
    experts._is_expert_parallel = True
    with refused("its _is_expert_parallel was False when"):
        model(input_ids=own)
    experts._is_expert_parallel = False
    model(input_ids=own)
    cut = made("Mixtral")
    cut.model.layers[1].mlp.experts._is_expert_parallel = True
    with refused("MixtralExperts is expert-parallel already"):
        rotate_all(cut, mesh=make_mesh("cpu"))


def test_kernels_that_are_switched_later_are_refused(ranks: StartRanks) -> None:
    ranks(2).run(switched)


def plans() -> tuple[str, str]:
    """The plan by a kernel that was not trained, and by one that another library registers."""
    told = []
    for kernel in ("batched_mm", "grouped_mm"):
        model = made("Qwen3Moe", kernel=kernel)
        other = {"grouped_mm": kernels.batched_mm_experts_forward}
        with patch.dict(kernels.ALL_EXPERTS_FUNCTIONS._global_mapping, other):
            told.append(str(rotate_all(model, mesh=make_mesh("cpu"), min_numel=0)))
    return told[0], told[1]


def test_other_kernels_are_gathered_on_use_and_the_plan_tells_why(ranks: StartRanks) -> None:
    for one, other in ranks(2).run(plans):
        for text, kernel in ((one, "batched_mm"), (other, "grouped_mm")):
            words = " ".join(text.split())
            assert f"the code of its experts kernel {kernel} is not among those" in words
