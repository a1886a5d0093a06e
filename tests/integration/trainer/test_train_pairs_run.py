"""A run of T5 learns targets of sources, evaluates and samples."""

from pathlib import Path

from gyre_trainer.training.history import committed

from tests.train_jobs import Jobs, tiny_run

T5 = {
    "model_type": "t5",
    "vocab_size": 257,
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


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
    config = tmp_path / "train.toml"
    config.write_text(
        tiny_run(
            tmp_path,
            run={"steps": 3},
            data=data,
            model={"config": T5},
            objective={"target_field": "tgt", "target_length": 4},
            eval={"dataset": str(tmp_path / "shards"), "every": 3, "batches": 1},
        )
    )
    status, errors = tiny_jobs.ran("run", str(config), "--nproc=2")
    assert status == 0, errors
    records = committed(tmp_path / "run" / "history.jsonl")
    assert [each.num_targets for each in records] == [8, 8, 8], "a byte and the end, of 4 samples"
