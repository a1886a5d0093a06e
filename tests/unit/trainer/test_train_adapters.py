"""Adapters of a causal model are files that peft alone loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_trainer import pretrained
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
