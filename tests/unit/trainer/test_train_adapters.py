"""Adapters of a causal model are files that peft alone loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_trainer import pretrained
from gyre_trainer.errors import CheckpointRejected
from gyre_trainer.training.library import LibraryConfig, library_model
from gyre_trainer.training.lora import Lora, adapt

LLAMA = {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def test_adapters_are_loaded_by_the_class_of_peft_for_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # peft asks for a tokenizer otherwise
    base, out = tmp_path / "base", tmp_path / "adapters"
    model: Any = library_model(LibraryConfig(config=LLAMA))
    model.save_pretrained(base)
    adapt(model, Lora(rank=2), seed=0, base=str(base))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    pretrained.save_pretrained(model, out)

    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(str(out))
    assert type(loaded).__name__ == "PeftModelForCausalLM"
    assert type(loaded.get_base_model()).__name__ == "LlamaForCausalLM"
    expected = model.state_dict()
    found = loaded.get_base_model().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_alpha": 9},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 16}},
        {"init_lora_weights": "pissa"},  # which changes the weights below
    ],
    ids=lambda each: next(iter(each)),
)
def test_weights_of_adapters_that_compute_something_else_are_refused(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    import peft

    named: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    plain: dict[str, Any] = {"init_lora_weights": False}  # of values, which change nothing below
    for folder, own in (("same", plain), ("other", settings)):
        base: Any = library_model(LibraryConfig(config=LLAMA))
        made: Any = peft.get_peft_model(base, peft.LoraConfig(**named | own))
        made.save_pretrained(str(tmp_path / folder))
    model = library_model(LibraryConfig(config=LLAMA))
    adapt(model, Lora(rank=2, targets=("q_proj",)), seed=0)
    pretrained.load(model, tmp_path / "same")
    with pytest.raises(CheckpointRejected, match=f"other has {next(iter(settings))} "):
        pretrained.load(model, tmp_path / "other")
