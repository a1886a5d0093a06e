"""The trainer's steps on a model of `transformers` are those of one process with that library."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import CheckpointRejected, ConfigError
from gyre_trainer.pretrained import save_pretrained
from gyre_trainer.shards.layout import local_of
from gyre_trainer.training.build import build_model, loss_of
from gyre_trainer.training.collate import Examples
from gyre_trainer.training.config import TrainConfig, build
from gyre_trainer.training.rank_context import RankContext
from gyre_trainer.training.step import Stepper, build_optimizers
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks

NUM_STEPS = 3
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config(folder: Path, **lora: Any) -> TrainConfig:
    sections = {
        "run": {"out": "nowhere", "steps": NUM_STEPS},
        "data": {"dataset": "none", "batch_size": 4, "sequence_length": 8},
        "model": {"pretrained": str(folder), "lora": lora},
    }
    return build(TrainConfig, sections)


def rows(step: int) -> Tensor:
    return torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(step))


def train(folder: Path, out: Path) -> list[float]:
    """The loss of each step, summed over the targets of this rank. Runs on each rank."""
    sums, model = trained(config(folder))
    save_pretrained(model, out)
    return sums


def trained(settings: TrainConfig) -> tuple[list[float], nn.Module]:
    rank, size = dist.get_rank(), dist.get_world_size()
    context = RankContext(rank, size, torch.device("cpu"), make_mesh("cpu"))
    stepper = Stepper(build_model(settings, context), settings)
    sums = []
    for step in range(NUM_STEPS):
        here = rows(step).chunk(size)[rank]
        sums.append(float(stepper.take(Examples(here[:, :-1], here[:, 1:], None), step)))
    return sums, stepper.model


def begun_from(base: Path, adapters: Path) -> list[str]:
    """What is said of adapters that fit, and of two that do not; checks those that fit."""
    told = []
    context = RankContext(dist.get_rank(), dist.get_world_size(), CPU, make_mesh("cpu"))
    for lora in ({"rank": 2}, {"rank": 3}, {"rank": 2, "alpha": 4.0}, {}):
        sections = asdict(config(base))
        sections["model"] = {"pretrained": str(base), "lora": lora}
        settings = build(TrainConfig, sections)
        try:
            model = build_model(settings, context, adapters)
        except (CheckpointRejected, ConfigError) as error:
            told.append(str(error))
            continue
        values = load_file(adapters / "adapter_model.safetensors")
        found = dict(model.named_parameters())
        for name, value in values.items():
            here = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
            assert torch.equal(local_of(found[here]), value), name
    return told


def test_adapters_of_an_earlier_run_are_taken_or_refused_with_what_differs(
    tmp_path: Path, ranks: StartRanks
) -> None:
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    library: Any = AutoModelForCausalLM
    alone = library.from_config(AutoConfig.for_model("llama", **SHAPE))
    alone.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False)
    peft.get_peft_model(alone, settings).save_pretrained(str(tmp_path / "adapters"))
    told = ranks(2).run(begun_from, tmp_path / "base", tmp_path / "adapters")
    for of_rank, of_alpha, of_none in told:
        assert "has the shape [2, 32], but [3, 32] in the model" in of_rank
        assert "has lora_alpha 8, but that of the model 4.0" in of_alpha
        assert "it has adapters, but `model.lora` has rank 0" in of_none


@pytest.mark.parametrize(("family", "apart"), [("llama", True), ("rwkv", False)])
def test_packed_documents_do_not_see_each_other_where_the_family_can_do_that(
    family: str, apart: bool
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    library: Any = AutoModelForCausalLM
    shape = SHAPE if apart else {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(5)
    model = library.from_config(AutoConfig.for_model(family, **shape))
    loss: Any = loss_of(model)
    tokens, targets = rows(0)[:1, :-1], rows(0)[:1, 1:]
    positions = torch.arange(4).repeat(2)[None]
    assert loss.keeps_apart(1) == apart
    packed = loss(tokens, targets, None, positions)
    parts = [loss(tokens[:, each], targets[:, each]) for each in (slice(0, 4), slice(4, 8))]
    alone = float(sum(parts).detach()) / 2 if apart else float(loss(tokens, targets).detach())
    assert float(packed.detach()) == pytest.approx(alone, rel=1e-5)
    if apart:
        assert float(loss(tokens, targets).detach()) != pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "granite"])  # granite scales its logits
def test_a_pretrained_model_trains_as_in_one_process_and_goes_back(
    family: str, tmp_path: Path, ranks: StartRanks
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    scale = {"logits_scaling": 3.0} if family == "granite" else {}
    torch.manual_seed(5)
    library: Any = AutoModelForCausalLM
    alone = library.from_config(AutoConfig.for_model(family, **SHAPE, **scale))
    alone.save_pretrained(tmp_path / "before")
    (optimizer,) = build_optimizers(alone, config(tmp_path / "before"))
    sums = ranks(2).run(train, tmp_path / "before", tmp_path / "after")
    require_as_alone(sums, alone, optimizer)
    after = library.from_pretrained(tmp_path / "after")
    with torch.no_grad():
        torch.testing.assert_close(
            after(rows(9)).logits, alone(rows(9)).logits, rtol=1e-3, atol=1e-4
        )


def require_as_alone(sums: list[list[float]], alone: Any, optimizer: torch.optim.Optimizer) -> None:
    """Train in one process, and compare each step's loss."""
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = [1e-3, 5.5e-4, 1e-4][step]  # half a cosine
        tokens, targets = rows(step)[:, :-1], rows(step)[:, 1:]
        logits = alone(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert sum(each[step] for each in sums) / 32 == pytest.approx(loss.item(), rel=1e-5)
