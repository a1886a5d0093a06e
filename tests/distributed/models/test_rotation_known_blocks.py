"""Attention, MLPs and experts whose code is in the table rotate as one, exactly."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import rotate_all
from torch import Tensor

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.test_rotation_mispaired import loss_of, rows, sparse
from tests.distributed.training import whole

DIM = 6
MODELS = [("Llama", "sdpa"), ("Llama", "eager"), ("Qwen2", "sdpa"), ("Qwen3", "eager")]


def made(family: str, attention: str) -> Any:
    """A tiny model in float64: with biases (Qwen2), and norms inside of attention (Qwen3)."""
    import transformers  # seconds, for these tests alone

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "Qwen3":
        heads["head_dim"] = 8
    library: Any = transformers
    config = getattr(library, f"{family}Config")(
        vocab_size=61, attn_implementation=attention, use_cache=False, **heads, **sizes
    )
    return getattr(library, f"{family}ForCausalLM")(config).double()


def tokens() -> Tensor:
    return torch.randint(61, (4, 7), generator=torch.Generator().manual_seed(1))


def outcome(model: Any, rows: Tensor) -> dict[str, Tensor]:
    """Loss, gradients, and the weights of attention where the model gives them."""
    output = model(input_ids=rows, labels=rows, output_attentions=_is_eager(model))
    output.loss.backward()
    found = {"loss": output.loss.detach()}
    found |= {name: whole(p.grad) for name, p in model.named_parameters()}
    if _is_eager(model):
        found["weights"] = torch.stack(output.attentions).detach()
    return found


def _is_eager(model: Any) -> bool:
    return bool(model.config._attn_implementation == "eager")


def rotated(family: str, attention: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The rule of each rotated module, and the outcome of this rank's rows."""
    model = made(family, attention)
    plan = rotate_all(model, mesh=make_mesh("cpu"), find_blocks=True)
    rules = {entry.path: entry.rule for entry in plan.entries if entry.how == "rotated"}
    return rules, outcome(model, tokens().chunk(dist.get_world_size())[dist.get_rank()])


@pytest.mark.parametrize(("family", "attention"), MODELS)
def test_blocks_of_transformers_rotate_as_one_and_are_exact(
    ranks: StartRanks, family: str, attention: str
) -> None:
    expected = outcome(made(family, attention), tokens())
    found = ranks(2).run(rotated, family, attention)
    for rank, (rules, parts) in enumerate(found):
        blocks = {f"model.layers.{n}" for n in range(2)}
        assert {path for path, rule in rules.items() if rule == "AttentionRule"} == {
            f"{block}.self_attn" for block in blocks
        }
        assert {path for path, rule in rules.items() if rule == "MLPRule"} == {
            f"{block}.mlp" for block in blocks
        }
        for name in expected.keys() - {"loss", "weights"}:
            torch.testing.assert_close(parts[name], expected[name], rtol=1e-4, atol=1e-7)
        if "weights" in expected:
            torch.testing.assert_close(
                parts["weights"], expected["weights"][:, 2 * rank : 2 * rank + 2]
            )
    mean = torch.stack([parts["loss"] for _, parts in found]).mean()
    torch.testing.assert_close(mean, expected["loss"], rtol=1e-6, atol=0)


def losses_of_experts() -> float:
    """The loss of this rank's three tokens, of which most experts get none."""
    model = sparse("Mixtral")
    rotate_all(model, mesh=make_mesh("cpu"), find_blocks=True)
    loss = loss_of(model, rows(2)[[dist.get_rank()]])
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def test_experts_are_blocks_though_ranks_use_different_ones(ranks: StartRanks) -> None:
    model = sparse("Mixtral")
    expected = [float(loss_of(model, rows(2)[[rank]]).detach()) for rank in range(2)]
    assert ranks(2).run(losses_of_experts) == pytest.approx(expected, rel=1e-6)
