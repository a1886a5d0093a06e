"""Stacked experts of transformers 5 by its default kernel train as those of one process."""

from contextlib import nullcontext
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

SIZES: dict[str, Any] = dict.fromkeys(("hidden_size", "moe_intermediate_size"), 16) | {
    "vocab_size": 31,
    "intermediate_size": 24,  # torch's grouped products take rows of 16 bytes or a multiple
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_cache": False,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
FAMILIES = ["Mixtral", "Qwen3Moe", "GptOss"]


def made(family: str, num_experts: int) -> Any:
    """A tiny model with biases other than zero, by the default kernel of the library."""
    import transformers  # seconds, for these tests alone

    library: Any = transformers
    name = "num_experts" if family == "Qwen3Moe" else "num_local_experts"
    torch.manual_seed(0)
    config = getattr(library, f"{family}Config")(**SIZES, **{name: num_experts})
    model = getattr(library, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def rotated(model: Any, policy: RotationPolicy) -> None:
    """Rotate a model, whose experts do so as one."""
    plan = rotate_all(model, mesh=make_mesh("cpu"), min_numel=0, policy=policy)
    rules = [each.rule for each in plan.entries if each.path.endswith("experts")]
    assert rules == ["ExpertsRule"] * 2, str(plan)


def outcome(model: Any, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients of all parameters, that of the embedding by the input's."""
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def distances(
    policy: RotationPolicy, num_experts: int, form: str
) -> dict[str, tuple[float, float]]:
    """How far the losses and gradients of rotated models are from those of one process."""
    rows, found = torch.randint(1, 31, (12, 5), generator=torch.Generator().manual_seed(1)), {}
    for family in FAMILIES:
        one, other = made(family, num_experts), made(family, num_experts)
        for model in (one, other):
            for name, parameter in model.named_parameters():
                if form == "ties" and ("router" in name or "mlp.gate." in name):
                    nn.init.zeros_(parameter)  # all tokens choose the same two experts
            if form == "float64":
                model.double()
        rotated(other, policy)
        # torch's product refuses float64, in place of which the library has one of its own
        own = patch.object(kernels, "_can_use_grouped_mm", lambda *_: False)
        with own if form == "float64" else nullcontext():
            loss, expected = outcome(one, rows)
            mine, grads = outcome(other, rows.chunk(dist.get_world_size())[dist.get_rank()])
        dist.all_reduce(mine)
        assert grads.keys() == expected.keys()
        far = max(apart(grads[name].to(expected[name]), expected[name]) for name in expected)
        found[family] = apart(mine / dist.get_world_size(), loss), far
    return found


@pytest.mark.parametrize(
    ("num_ranks", "recompute", "num_experts", "form"),
    [
        (2, "none", 5, ""),
        (3, "block", 5, ""),
        (3, "layer", 5, ""),
        (3, "none", 2, ""),
        (3, "none", 6, "ties"),
        (3, "none", 5, "float64"),
    ],
    ids=["uneven", "block", "layer", "fewer than ranks", "slices without tokens", "float64"],
)
def test_experts_by_the_default_kernel_train_exactly(
    ranks: StartRanks, num_ranks: int, recompute: Any, num_experts: int, form: str
) -> None:
    """But for norms and the router's softmax, which the library takes in float32."""
    policy = RotationPolicy(recompute=recompute)
    for found in ranks(num_ranks).run(distances, policy, num_experts, form):
        assert all(loss <= 1e-6 and grads <= 2e-5 for loss, grads in found.values()), found


def test_losses_in_bfloat16_are_within_rounding(ranks: StartRanks) -> None:
    """A token may choose another expert, which moves gradients further."""
    for found in ranks(2).run(distances, RotationPolicy(compute_dtype=torch.bfloat16), 5, ""):
        assert all(loss <= 2e-2 for loss, _ in found.values()), found


def switched() -> str:
    """The plan of a model whose kernel is unknown, after others were refused."""
    model, rows = made("Mixtral", 5), torch.ones(2, 5, dtype=torch.int64)
    rotated(model, RotationPolicy())
    experts, table = model.model.layers[0].mlp.experts, kernels.ALL_EXPERTS_FUNCTIONS
    other = patch.dict(table._global_mapping, grouped_mm=kernels.batched_mm_experts_forward)
    experts.config._experts_implementation = "eager"
    with pytest.raises(RotationError, match="its experts kernel was 'grouped_mm' when"):
        model(input_ids=rows)
    experts.config._experts_implementation = "grouped_mm"
    with (
        other,
        pytest.raises(RotationError, match="kernel's function was grouped_mm_experts_forward when"),
    ):
        model(input_ids=rows)
    experts._is_expert_parallel = True
    with pytest.raises(RotationError, match="its _is_expert_parallel was False when"):
        model(input_ids=rows)
    cut = made("Mixtral", 5)
    cut.model.layers[1].mlp.experts._is_expert_parallel = True
    with pytest.raises(RotationError, match="MixtralExperts is expert-parallel already"):
        rotate_all(cut, mesh=make_mesh("cpu"))
    with other:
        return str(rotate_all(made("Qwen3Moe", 5), mesh=make_mesh("cpu"), min_numel=0))


def test_kernels_of_other_code_are_refused_or_gathered_on_use(ranks: StartRanks) -> None:
    for told in ranks(2).run(switched):
        reason = "the code of its experts kernel grouped_mm is not among those"
        assert reason in " ".join(told.split())
