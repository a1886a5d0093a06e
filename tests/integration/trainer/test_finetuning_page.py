"""The page about fine-tuning: its files run as they are, but for sizes and paths."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from gyre_trainer.training.history import read
from safetensors.torch import load_file

from tests.fenced import blocks
from tests.train_jobs import Jobs

PAGE = "docs/finetuning.md"
SECONDS = 200
SMALLER = {
    "1025": "33",
    "1024": "32",
    "steps = 500": "steps = 4",
    "NUM_STEPS, SAVE_EVERY = 500, 100": "NUM_STEPS, SAVE_EVERY = 4, 2",
    "every = 100": "every = 4",
    "warmup_steps = 20": "warmup_steps = 1",
    "rank = 16": "rank = 2",
    "loader.last_step % 10 == 0": "True",
}
WORDS = ("the", "food", "was", "good", "bad", "staff", "were", "kind", "never", "warm", "cold")


@pytest.fixture
def short() -> Iterator[str]:
    """A folder for a socket, whose path must be short."""
    with TemporaryDirectory(prefix="gyre-page-") as folder:
        yield folder


def write_inputs(folder: Path) -> None:
    """The page's folders: a tiny Llama in bfloat16 with its tokenizer, and reviews."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    chooser = random.Random(0)
    reviews = [" ".join(chooser.choices(WORDS, k=chooser.randint(3, 40))) for _ in range(160)]
    for name, chosen in {"train": reviews[:120], "held-out": reviews[120:]}.items():
        (folder / "data/reviews" / name).mkdir(parents=True)
        lines = "".join(json.dumps({"text": text, "stars": 3}) + "\n" for text in chosen)
        (folder / "data/reviews" / name / "a.jsonl").write_text(lines)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(reviews, trainer)
    library: Any = transformers
    config = library.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = library.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder / "models/llama")
    tokenizer.save(str(folder / "models/llama/tokenizer.json"))


def on_this_machine(language: str, name: str, folder: Path, short: str) -> Path:
    """A file of the page, written with the sizes and paths of the test."""
    (code,) = (each for each in blocks(PAGE, language) if each.startswith(f"# {name}\n"))
    for theirs, ours in SMALLER.items():
        code = code.replace(theirs, ours)
    code = code.replace("/models/", f"{folder}/models/").replace("/data/", f"{folder}/data/")
    path = folder / name
    path.write_text(code.replace("/tmp/gyre/", f"{short}/"))
    return path


def test_the_configuration_trains_evaluates_and_exports_adapters(
    tmp_path: Path, tiny_jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    write_inputs(tmp_path)
    config = on_this_machine("toml", "finetune.toml", tmp_path, "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    where = (f"--set=run.out={run}", "--set=run.device=cpu")
    status, errors = tiny_jobs.ran("run", str(config), "--nproc=2", "--resume-if-any", *where)
    assert status == 0, errors
    history = run / "history.jsonl"
    assert len(list(read(history).steps)) == 4
    assert read(history).evaluations
    status, errors = tiny_jobs.ran("export", str(run), str(tmp_path / "adapters"))
    assert status == 0, errors
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "models/llama")
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapters")
    names = [name for name, each in adapted.named_parameters() if "lora_B" in name and each.any()]
    assert len(names) == 2  # those of q and v, which peft chooses, have learnt


@pytest.mark.timeout(2 * SECONDS)
def test_the_loop_resumes_to_the_bit_and_keeps_attention_inside_documents(
    tmp_path: Path, short: str
) -> None:
    write_inputs(tmp_path)
    on_this_machine("toml", "gyre.toml", tmp_path, short)
    on_this_machine("python", "finetune.py", tmp_path, short)
    (serve,) = (each for each in blocks(PAGE, "sh") if "gyred serve" in each)
    serve = serve.replace("/tmp/gyre/", f"{short}/").replace(
        "2 finetune.py", "2 --standalone finetune.py"
    )
    again = serve.splitlines()[-1]
    between = "mv result first; rm -r own-run/step-000004"
    environment: dict[str, Any] = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        ["bash", "-e", "-c", f"trap 'kill %1; wait' EXIT\n{serve}\n{between}\n{again}"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    printed = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    losses = [(int(step), float(loss)) for step, loss in printed]
    assert [step for step, _ in losses] == [0, 1, 2, 3, 2, 3]
    assert losses[4:] == losses[2:4]
    first, resumed = (
        load_file(tmp_path / each / "model.safetensors") for each in ("first", "result")
    )
    assert all(torch.equal(first[name], resumed[name]) for name in first)
    assert first.keys() == load_file(tmp_path / "models/llama/model.safetensors").keys()
