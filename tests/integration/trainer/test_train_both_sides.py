"""Runs of BERT and T5: they learn, resume to the bit, go back to `transformers`, and sample."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gyre_trainer.training.records.history import Evaluation, Sample, committed, notes
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.train_jobs import Jobs, tiny_run

BERT = {
    "model_type": "bert",
    "vocab_size": 70,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
T5 = {
    "model_type": "t5",
    "vocab_size": 70,
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
DATA = {
    "options": {"dtype": "uint16", "sequence_length": 16},
    "sequence_length": 16,
    "batch_size": 12,
}
OPTIMIZER = {"lr": 0.01, "schedule": "constant"}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "bert": (BERT, {"mask_id": 69, "special_ids": [2]}, "AutoModelForMaskedLM"),
    "t5": (T5, {"sentinel_id": 69}, "AutoModelForSeq2SeqLM"),
}


def whole(checkpoint: Path, to: Path) -> dict[str, Any]:
    dcp_to_torch_save(checkpoint, to)
    state: dict[str, Any] = torch.load(to, weights_only=True)["model"]
    return state


def losses(run: Path) -> list[float]:
    return [each.loss for each in committed(run / "history.jsonl")]


@pytest.mark.parametrize("family", ["bert", pytest.param("t5", marks=pytest.mark.models)])
def test_a_run_learns_resumes_and_is_the_same_on_any_number_of_ranks(
    family: str, tmp_path: Path, tiny_jobs: Jobs
) -> None:
    import transformers

    keys, objective, library = FAMILIES[family]
    # the order of the tokens is what there is to learn, whichever are hidden
    (np.arange(960) % 16 + 5).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    config = tmp_path / "train.toml"
    config.write_text(
        tiny_run(
            tmp_path,
            run={"steps": 40, "log_every": 10},
            data=DATA,
            model={"config": keys},
            objective=objective,
            optimizer=OPTIMIZER,
            checkpoint={"every": 20},
        )
    )
    status, errors = tiny_jobs.ran("run", str(config), "--nproc=2")
    assert status == 0, errors
    found = losses(tmp_path / "run")
    assert len(found) == 40
    assert np.mean(found[-5:]) < 0.8 * np.mean(found[:5])

    resumed = tmp_path / "resumed"
    at_20 = str(tmp_path / "run/checkpoints/step-00000020")
    status, errors = tiny_jobs.ran(
        "run", str(config), "--nproc=2", "--resume", at_20, f"--set=run.out={resumed}"
    )
    assert status == 0, errors
    assert losses(resumed) == found[20:]
    states = [
        whole(each / "checkpoints/step-00000040", tmp_path / "whole.pt")
        for each in (tmp_path / "run", resumed)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    for num_ranks in (1, 3):
        out = tmp_path / f"on-{num_ranks}"
        more = (f"--nproc={num_ranks}", f"--set=run.out={out}", "--set=run.steps=6")
        status, errors = tiny_jobs.ran("run", str(config), *more)
        assert status == 0, errors
        assert losses(out) == pytest.approx(found[:6], rel=1e-4)
        of_targets = [
            [each.num_targets for each in committed(run / "history.jsonl")][:6]
            for run in (out, tmp_path / "run")
        ]
        assert of_targets[0] == of_targets[1]

    status, errors = tiny_jobs.ran("export", str(tmp_path / "run"), str(tmp_path / "out"))
    assert status == 0, errors
    model = getattr(transformers, library).from_pretrained(tmp_path / "out")
    state = model.state_dict()
    assert all(torch.equal(state[name], each) for name, each in states[0].items())


@pytest.mark.parametrize("family", ["t5", pytest.param("bert", marks=pytest.mark.models)])
def test_a_run_begins_with_a_folder_of_transformers_and_samples(
    family: str, tmp_path: Path, tiny_jobs: Jobs
) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    keys, _, library = FAMILIES[family]
    special = ["[PAD]", "</s>", "[MASK]", "<extra_id_0>"]
    names = {name: index for index, name in enumerate(special[:3])}
    names |= {f"w{index}": index for index in range(3, 69)} | {special[3]: 69}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    fast_tokenizer: Any = transformers.PreTrainedTokenizerFast
    fast = fast_tokenizer(tokenizer_object=tokenizer, mask_token="[MASK]")
    torch.manual_seed(3)
    auto: Any = transformers.AutoConfig
    settings = dict(keys)
    described = auto.for_model(settings.pop("model_type"), **settings)
    before = getattr(transformers, library).from_config(described)
    wider: Any = before
    if family == "bert":  # with a second head, as BERT was pretrained
        pretraining: Any = transformers.BertForPreTraining
        wider = pretraining(described)
        wider.load_state_dict(before.state_dict(), strict=False)
    wider.save_pretrained(tmp_path / "base")
    fast.save_pretrained(tmp_path / "base")
    prompt = "w5 [MASK] w7" if family == "bert" else "w5 <extra_id_0> w7"
    config = tmp_path / "train.toml"
    config.write_text(
        tiny_run(
            tmp_path,
            run={"steps": 1},
            data=DATA,
            model={"pretrained": str(tmp_path / "base")},
            optimizer={"lr": 1e-30, "min_lr": 0},
            eval={"dataset": str(tmp_path / "tokens.bin"), "every": 1, "batches": 1},
            sample={"prompts": [prompt], "max_new_tokens": 4},
        )
    )
    told = []
    for num_ranks in (1, 2):
        out = tmp_path / f"on-{num_ranks}"
        status, errors = tiny_jobs.ran(
            "run", str(config), f"--nproc={num_ranks}", f"--set=run.out={out}"
        )
        assert status == 0, errors
        (sample,) = notes(out / "history.jsonl", Sample)
        (evaluation,) = notes(out / "history.jsonl", Evaluation)
        told.append((sample.text, evaluation.eval_loss))
    assert told[0][0] == told[1][0]
    assert told[0][1] == pytest.approx(told[1][1], rel=1e-5)
    ids = torch.tensor([fast.encode(prompt, add_special_tokens=True)])
    with torch.no_grad():
        before.eval()
        if family == "bert":
            filled = ids.clone()
            filled[ids == 2] = before(input_ids=ids).logits.argmax(-1)[ids == 2]
            assert told[0][0] == tokenizer.decode(filled[0].tolist())
        else:
            written = before.generate(ids, max_new_tokens=4, do_sample=False)[0, 1:].tolist()
            until_end = written[: written.index(1)] if 1 in written else written
            assert told[0][0] == tokenizer.decode(until_end, skip_special_tokens=False)


@pytest.mark.models
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_a_run_are_loaded_by_peft(
    family: str, tmp_path: Path, tiny_jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft
    import transformers

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # peft asks for a tokenizer otherwise
    keys, objective, library = FAMILIES[family]
    config, out = tmp_path / "train.toml", tmp_path / "adapters"
    auto: Any = transformers.AutoConfig
    settings = dict(keys)
    described = auto.for_model(settings.pop("model_type"), **settings)
    getattr(transformers, library).from_config(described).save_pretrained(tmp_path / "base")
    config.write_text(
        tiny_run(
            tmp_path,
            data=DATA,
            model={"pretrained": str(tmp_path / "base"), "lora": {"rank": 2}},
            objective=objective,
            optimizer=OPTIMIZER,
        )
    )
    status, errors = tiny_jobs.ran("run", str(config), "--nproc=2")
    assert status == 0, errors
    status, errors = tiny_jobs.ran("export", str(tmp_path / "run"), str(out), "--nproc=2")
    assert status == 0, errors
    loads = peft.AutoPeftModelForSeq2SeqLM if family == "t5" else peft.AutoPeftModel
    loaded: Any = loads.from_pretrained(str(out))
    found = loaded.get_base_model().state_dict()
    expected = whole(tmp_path / "run/checkpoints/step-00000002", tmp_path / "whole.pt")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert all(each.any() for name, each in found.items() if "lora_B" in name)


def test_sources_and_targets_of_a_shard_are_learned(tmp_path: Path, tiny_jobs: Jobs) -> None:
    import webdataset

    (tmp_path / "shards").mkdir()
    with webdataset.TarWriter(str(tmp_path / "shards" / "pairs-0.tar")) as writer:
        for index in range(24):
            text = "abcdefgh"[index % 8 :] + "ab"
            writer.write({"__key__": f"{index:04}", "src": text.encode(), "tgt": text[0].encode()})
    data = {
        "dataset": str(tmp_path / "shards"),
        "format": "webdataset",
        "options": {"fields": ["src", "tgt"]},
        "field": "src",
        "sequence_length": 12,
    }
    keys = T5 | {"vocab_size": 257}
    config = tmp_path / "train.toml"
    config.write_text(
        tiny_run(
            tmp_path,
            run={"steps": 3},
            data=data,
            model={"config": keys, "objective": "seq2seq"},
            objective={"target_field": "tgt", "target_length": 4},
            eval={"dataset": str(tmp_path / "shards"), "every": 3, "batches": 1},
            sample={"prompts": ["cdab"], "max_new_tokens": 2, "tokenizer": "bytes"},
        )
    )
    status, errors = tiny_jobs.ran("run", str(config), "--nproc=2")
    assert status == 0, errors
    records = committed(tmp_path / "run" / "history.jsonl")
    assert [each.num_targets for each in records] == [8, 8, 8], "a byte and the end, of 4 samples"
    assert len(list(notes(tmp_path / "run" / "history.jsonl", Sample))) == 1
