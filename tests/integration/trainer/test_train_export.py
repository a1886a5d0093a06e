"""`gyre-train export`: a checkpoint becomes a folder that `transformers` loads, bit by bit."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.preloaded.interpreter import Interpreter
from tests.train_jobs import IMPORTS, Jobs

DEADLINE_S = 240.0
CONFIG = """
[run]
out = "{folder}/run"
steps = 2
device = "cpu"
threads = 1
[data]
dataset = "{folder}/tokens.bin"
format = "tokens"
options = {{ dtype = "uint16", sequence_length = 9 }}
batch_size = 4
sequence_length = 8
[model]
{model}
"""
# Weights that stay what they are: no rate that float32 would notice.
STAYS = ("--set=optimizer.lr=1e-30", "--set=optimizer.min_lr=0")
LLAMA = """[model.config]
model_type = "llama"
vocab_size = 65
hidden_size = 24
intermediate_size = 40
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2"""
GPT = """vocab_size = 65
num_layers = 1
dim = 16
num_heads = 2
num_kv_heads = 2
hidden_dim = 32"""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    (np.arange(400) % 64).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    interpreter = Interpreter([*IMPORTS, "gyre_trainer.training.export"])
    jobs = Jobs(interpreter, tmp_path)
    yield jobs
    jobs.end(DEADLINE_S)
    interpreter.close()


def ran(jobs: Jobs, *arguments: str) -> tuple[int, str]:
    job = jobs.start(*arguments)
    errors = job.errors(DEADLINE_S)
    return job.wait(DEADLINE_S), errors


def test_an_exported_model_has_every_bit_of_the_checkpoint(tmp_path: Path, jobs: Jobs) -> None:
    from transformers import AutoModelForCausalLM

    config, run, out = tmp_path / "train.toml", tmp_path / "run", tmp_path / "exported"
    config.write_text(CONFIG.format(folder=tmp_path, model=LLAMA))
    assert ran(jobs, "run", str(config))[0] == 0
    status, errors = ran(jobs, "export", str(run), str(out), "--nproc", "3")
    assert status == 0, errors
    dcp_to_torch_save(run / "checkpoints/step-00000002", tmp_path / "whole.pt")
    expected = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    library: Any = AutoModelForCausalLM
    found = library.from_pretrained(out).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    status, errors = ran(
        jobs,
        *("run", str(config), "--init-from", str(out), "--nproc", "2"),
        *(f"--set=run.out={tmp_path}/next", "--set=run.steps=1", *STAYS),
    )
    assert status == 0, errors
    dcp_to_torch_save(tmp_path / "next/checkpoints/step-00000001", tmp_path / "next.pt")
    begun = torch.load(tmp_path / "next.pt", weights_only=True)["model"]
    assert all(torch.equal(begun[name], expected[name]) for name in expected)

    status, errors = ran(jobs, "export", str(tmp_path / "nothing"), str(out))
    assert status == 2
    assert "there is no checkpoint in" in errors


def test_adapters_are_trained_resumed_and_exported_as_peft_has_them(
    tmp_path: Path, jobs: Jobs
) -> None:
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    library: Any = AutoModelForCausalLM
    shape = tomllib.loads(LLAMA)["model"]["config"]
    before = library.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape))
    before.save_pretrained(tmp_path / "base")
    config, run, out = tmp_path / "train.toml", tmp_path / "run", tmp_path / "adapters"
    model = f'pretrained = "{tmp_path}/base"\nlora = {{ rank = 2, targets = ["q_proj", "v_proj"] }}'
    config.write_text(CONFIG.format(folder=tmp_path, model=model))
    rate = "--set=optimizer.lr=0.01"
    assert ran(jobs, "run", str(config), rate)[0] == 0
    status, errors = ran(jobs, "run", str(config), rate, "--resume", "--set=run.steps=4")
    assert status == 0, errors
    status, errors = ran(jobs, "export", str(run), str(out), "--nproc", "2")
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
        assert torch.equal(value, expected[name]), name
        if "lora_" not in name:
            assert torch.equal(value, base[name.replace(".base_layer", "")]), "it is frozen"
        if "lora_B" in name:
            assert value.any(), "it was trained"


def test_a_gpt_of_our_own_is_refused(tmp_path: Path, jobs: Jobs) -> None:
    config = tmp_path / "train.toml"
    config.write_text(CONFIG.format(folder=tmp_path, model=GPT))
    assert ran(jobs, "run", str(config), "--set=run.steps=1")[0] == 0
    status, errors = ran(jobs, "export", str(tmp_path / "run"), str(tmp_path / "exported"))
    assert status == 2, errors
    assert "is of a GPT of Gyre's own, which transformers does not know" in errors
    assert not (tmp_path / "exported").exists()
