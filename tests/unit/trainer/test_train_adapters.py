"""Adapters of a causal and a seq2seq model are files that peft alone loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_trainer.training.library import LibraryConfig, library_model, objective_of
from gyre_trainer.training.lora import Lora, adapt, save_adapters

SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1}
KEYS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"num_attention_heads": 4},
    "t5": {"vocab_size": 31, "d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 1, "num_heads": 4},
}
LOADS = {
    "llama": ("AutoPeftModelForCausalLM", "PeftModelForCausalLM", "LlamaForCausalLM"),
    "t5": ("AutoPeftModelForSeq2SeqLM", "PeftModelForSeq2SeqLM", "T5ForConditionalGeneration"),
}


@pytest.mark.parametrize("family", LOADS)
def test_adapters_are_loaded_by_the_class_of_peft_for_their_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # peft asks for a tokenizer otherwise
    base, out = tmp_path / "base", tmp_path / "adapters"
    config = LibraryConfig(config=KEYS[family] | {"model_type": family})
    model: Any = library_model(config)
    model.save_pretrained(base)
    adapt(model, Lora(rank=2), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    save_adapters(model, Lora(rank=2), objective_of(config), str(base), out)

    loader, kind, made = LOADS[family]
    loaded = getattr(peft, loader).from_pretrained(str(out))
    assert type(loaded).__name__ == kind
    assert type(loaded.get_base_model()).__name__ == made
    expected = model.state_dict()
    found = loaded.get_base_model().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
