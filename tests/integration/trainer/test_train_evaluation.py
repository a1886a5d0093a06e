"""Evaluations of `gyre-train run`."""

from pathlib import Path

from gyre_trainer.training.history import read

from tests.train_jobs import DEADLINE_S, Jobs, tiny_run

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 257,
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 1,
    "n_positions": 32,
    "resid_pdrop": 0.5,
}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 1000.0,
}


def test_evaluations_leave_out_the_loss_of_a_router(tmp_path: Path, tiny_jobs: Jobs) -> None:
    (tmp_path / "train.toml").write_text(
        tiny_run(
            tmp_path,
            model={"config": MIXTRAL},
            eval={"dataset": str(tmp_path / "tokens.bin"), "every": 1, "batches": 1},
        )
    )
    status, errors = tiny_jobs.ran("run", str(tmp_path / "train.toml"))
    assert status == 0, errors
    history = tmp_path / "run/history.jsonl"
    assert all(each.loss > 1000 for each in read(history).steps), "training has it"
    assert all(each.eval_loss < 10 for each in read(history).evaluations), "log(257) is 5.5"


def test_evaluations_are_without_dropout(tmp_path: Path, tiny_jobs: Jobs) -> None:
    (tmp_path / "train.toml").write_text(
        tiny_run(
            tmp_path,
            run={"steps": 12},
            data={"prefetch_batches": 1},  # so the run needs its session after an evaluation
            model={"config": GPT2},
            optimizer={"lr": 1e-30, "min_lr": 0},
            eval={"dataset": str(tmp_path / "tokens.bin"), "every": 6, "batches": 1},
        )
    )
    job = tiny_jobs.start("run", str(tmp_path / "train.toml"), "--nproc=2")
    errors = job.errors(DEADLINE_S)
    assert job.wait(DEADLINE_S) == 0, errors
    history = tmp_path / "run/history.jsonl"
    assert [each.step for each in read(history).steps] == list(range(12))
    first, second = read(history).evaluations
    assert (first.evaluated_at, second.evaluated_at) == (6, 12)
    assert first.eval_loss == second.eval_loss, "the weights stay, and dropout is off"
