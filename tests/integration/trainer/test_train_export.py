"""`gyre-train export`: a checkpoint becomes a folder that `transformers` loads, bit by bit."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.train_jobs import Jobs, tiny_run

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
    assert "there is no checkpoint in" in errors


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
        assert torch.equal(value, expected[name]), name
        if "lora_" not in name:
            assert torch.equal(value, base[name.replace(".base_layer", "")]), "it is frozen"
        if "lora_B" in name:
            assert value.any(), "it was trained"


def test_a_gpt_of_our_own_is_refused(tmp_path: Path, tiny_jobs: Jobs) -> None:
    config = tmp_path / "train.toml"
    config.write_text(tiny_run(tmp_path))
    assert tiny_jobs.ran("run", str(config), "--set=run.steps=1")[0] == 0
    status, errors = tiny_jobs.ran("export", str(tmp_path / "run"), str(tmp_path / "exported"))
    assert status == 2, errors
    assert "is of a GPT of Gyre's own, which transformers does not know" in errors
    assert not (tmp_path / "exported").exists()
