"""`gyre-train export`: a checkpoint becomes a folder that `transformers` loads, bit by bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gyre_trainer.layers.quantized import Format, decode, encode
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.train_jobs import DEADLINE_S, Jobs, tiny_run
from tests.waiting import until

# Weights that stay what they are: no rate that float32 would notice.
STAYS = ("--set=optimizer.lr=1e-30", "--set=optimizer.min_lr=0")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 65,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_an_exported_model_has_every_bit_of_the_checkpoint(tmp_path: Path, tiny_jobs: Jobs) -> None:
    from transformers import AutoModelForCausalLM

    config, run, out = tmp_path / "train.toml", tmp_path / "run", tmp_path / "exported"
    config.write_text(tiny_run(tmp_path, model={"config": LLAMA}))
    assert tiny_jobs.ran("run", str(config))[0] == 0
    status, errors = tiny_jobs.ran("export", str(run), str(out), "--nproc", "3")
    assert status == 0, errors
    dcp_to_torch_save(run / "checkpoints/step-00000002", tmp_path / "whole.pt")
    expected = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    library: Any = AutoModelForCausalLM
    found = library.from_pretrained(out).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    status, errors = tiny_jobs.ran(
        *("run", str(config), "--init-from", str(out), "--nproc", "2"),
        *(f"--set=run.out={tmp_path}/next", "--set=run.steps=1", *STAYS),
    )
    assert status == 0, errors
    dcp_to_torch_save(tmp_path / "next/checkpoints/step-00000001", tmp_path / "next.pt")
    begun = torch.load(tmp_path / "next.pt", weights_only=True)["model"]
    assert all(torch.equal(begun[name], expected[name]) for name in expected)

    status, errors = tiny_jobs.ran("export", str(tmp_path / "nothing"), str(out))
    assert status == 2
    assert "name the directory of a run" in errors


def test_adapters_are_trained_resumed_and_exported_as_peft_has_them(
    tmp_path: Path, tiny_jobs: Jobs
) -> None:
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    library: Any = AutoModelForCausalLM
    shape: dict[str, Any] = dict(LLAMA)
    before = library.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape))
    before.save_pretrained(tmp_path / "base")
    config, run, out = tmp_path / "train.toml", tmp_path / "run", tmp_path / "adapters"
    lora = {"rank": 2, "targets": ["q_proj", "v_proj"]}
    model = {"pretrained": str(tmp_path / "base"), "lora": lora}
    config.write_text(tiny_run(tmp_path, model=model))
    rate = "--set=optimizer.lr=0.01"
    assert tiny_jobs.ran("run", str(config), rate)[0] == 0
    status, errors = tiny_jobs.ran("run", str(config), rate, "--resume", "--set=run.steps=4")
    assert status == 0, errors
    status, errors = tiny_jobs.ran("export", str(run), str(out), "--nproc", "2")
    assert status == 0, errors
    dcp_to_torch_save(run / "checkpoints/step-00000004", tmp_path / "whole.pt")
    expected = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    base = before.state_dict()
    after: Any = peft.PeftModel.from_pretrained(library.from_pretrained(tmp_path / "base"), out)
    found = {
        name.removeprefix("base_model.model."): each for name, each in after.state_dict().items()
    }
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if "lora_" in name:
            assert torch.equal(value, expected[name]), name
        else:
            original = base[name.replace(".base_layer", "")]
            rounded = original.bfloat16().float() if original.ndim > 1 else original
            assert torch.equal(expected[name].float(), rounded), "it is frozen"
        if "lora_B" in name:
            assert value.any(), "it was trained"


@pytest.mark.models
def test_experts_are_trained_killed_resumed_and_exported_from_toml(
    tmp_path: Path, tiny_jobs: Jobs
) -> None:
    from transformers import AutoModelForCausalLM

    gpt_oss = LLAMA | {
        "model_type": "gpt_oss",
        "head_dim": 6,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    }
    config, run, out = tmp_path / "train.toml", tmp_path / "run", tmp_path / "exported"
    text = tiny_run(
        tmp_path,
        run={"steps": 300, "log_every": 1},
        model={"config": gpt_oss},
        checkpoint={"every": 2, "keep": 2},
        optimizer={"schedule": "constant", "lr": 0.02},
    )
    config.write_text(text)
    job = tiny_jobs.start("run", str(config), "--nproc=2")
    until((run / "checkpoints/latest").exists, DEADLINE_S)
    job.end(DEADLINE_S)
    step = int((run / "checkpoints/latest").read_text().split("-")[1])
    steps = f"--set=run.steps={step + 2}"
    status, errors = tiny_jobs.ran("run", str(config), "--nproc=2", "--resume", steps)
    assert status == 0, errors
    status, errors = tiny_jobs.ran(
        *("run", str(config), "--nproc=2", steps, f"--set=run.out={tmp_path}/never-killed")
    )
    assert status == 0, errors
    resumed, unbroken = losses(run), losses(tmp_path / "never-killed")
    assert len(resumed) == step + 2
    assert resumed == unbroken
    assert resumed[0] > resumed[max(resumed)]

    status, errors = tiny_jobs.ran("export", str(run), str(out), "--nproc=2")
    assert status == 0, errors
    dcp_to_torch_save(run / f"checkpoints/step-{step + 2:08}", tmp_path / "whole.pt")
    expected = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    library: Any = AutoModelForCausalLM
    exported = library.from_pretrained(out)
    alike = library.from_config(exported.config)
    alike.load_state_dict(expected)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, alike(tokens).logits)


def losses(run: Path) -> dict[int, float]:
    """The loss of each step of the committed history."""
    found: dict[int, float] = {}
    for line in map(json.loads, (run / "history.jsonl").read_text().splitlines()):
        if "resumed_at" in line:
            found = {step: loss for step, loss in found.items() if step < line["resumed_at"]}
        elif "loss" in line:
            found[line["step"]] = line["loss"]
    return found


@pytest.mark.parametrize(
    ("to", "apart"), [pytest.param("int8", 1e-3, marks=pytest.mark.models), ("nf4", 0.05)]
)
def test_adapters_of_frozen_weights_in_few_bits_are_trained_resumed_and_exported(
    tmp_path: Path, tiny_jobs: Jobs, to: Format, apart: float
) -> None:
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    library: Any = AutoModelForCausalLM
    shape: dict[str, Any] = dict(LLAMA)
    torch.manual_seed(1)
    base = library.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape))
    base.save_pretrained(tmp_path / "base")
    config, out = tmp_path / "train.toml", tmp_path / "adapters"
    lora = {"rank": 2, "targets": ["q_proj", "v_proj"], "frozen": to}
    text = tiny_run(
        tmp_path,
        run={"steps": 4, "log_every": 1},
        model={"pretrained": str(tmp_path / "base"), "lora": lora},
        optimizer={"lr": 0.01},
        eval={"dataset": str(tmp_path / "tokens.bin"), "every": 4, "batches": 25},
    )
    config.write_text(text)
    status, errors = tiny_jobs.ran("run", str(config), "--nproc=2", "--set=checkpoint.every=2")
    assert status == 0, errors
    (tmp_path / "run").rename(tmp_path / "whole")
    half = tmp_path / "whole/checkpoints/step-00000002"
    status, errors = tiny_jobs.ran("run", str(config), "--nproc=2", "--resume", str(half))
    assert status == 0, errors
    assert losses(tmp_path / "run") == {
        step: loss for step, loss in losses(tmp_path / "whole").items() if step >= 2
    }
    history = (tmp_path / "run/history.jsonl").read_text().splitlines()
    (evaluated,) = [line["eval_loss"] for line in map(json.loads, history) if "eval_loss" in line]

    status, errors = tiny_jobs.ran("export", str(tmp_path / "run"), str(out), "--nproc=3")
    assert status == 0, errors
    model: Any = peft.PeftModel.from_pretrained(library.from_pretrained(tmp_path / "base"), out)
    assert all(each.any() for name, each in model.state_dict().items() if "lora_B" in name)
    loss_of_floats = loss_of_all(model, tmp_path)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lora_" not in name and "lm_head" not in name:
            codes, scales = encode(module.weight.detach(), to)
            module.weight.data = decode(codes, scales, module.in_features, to)
    assert evaluated == pytest.approx(loss_of_all(model, tmp_path), rel=1e-5)
    assert evaluated == pytest.approx(loss_of_floats, rel=apart)
    assert evaluated != pytest.approx(loss_of_floats, rel=1e-6)
    dcp_to_torch_save(tmp_path / "run/checkpoints/step-00000004", tmp_path / "whole.pt")
    saved = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    codes = saved["model.layers.0.mlp.up_proj.weight"]
    assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (40, 24 if to == "int8" else 32))


@torch.no_grad()
def loss_of_all(model: Any, folder: Path) -> float:
    """The mean loss on all windows of the tokens."""
    rows = torch.from_numpy(np.fromfile(folder / "tokens.bin", np.uint16).astype(np.int64))
    rows = rows.view(-1, 9)
    logits = model(input_ids=rows[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def test_frozen_weights_in_few_bits_are_refused_where_they_cannot_be(
    tmp_path: Path, tiny_jobs: Jobs
) -> None:
    config = tmp_path / "train.toml"
    gpt2 = {"model_type": "gpt2", "vocab_size": 65, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config.write_text(
        tiny_run(tmp_path, model={"config": gpt2, "lora": {"rank": 2, "frozen": "nf4"}})
    )
    status, errors = tiny_jobs.ran("run", str(config))
    assert status == 2, errors
    assert "`model.lora.frozen` is nf4, but no linear layer of" in errors
    status, errors = tiny_jobs.ran("run", str(config), '--set=model.lora={frozen="nf4"}')
    assert status == 2, errors
    assert "`model.lora.frozen` is nf4, but `model.lora.rank` is 0" in errors


def test_a_gpt_of_our_own_is_refused(tmp_path: Path, tiny_jobs: Jobs) -> None:
    config = tmp_path / "train.toml"
    config.write_text(tiny_run(tmp_path))
    assert tiny_jobs.ran("run", str(config), "--set=run.steps=1")[0] == 0
    status, errors = tiny_jobs.ran("export", str(tmp_path / "run"), str(tmp_path / "exported"))
    assert status == 2, errors
    assert "is of a GPT of Gyre's own, which transformers does not know" in errors
    assert not (tmp_path / "exported").exists()
