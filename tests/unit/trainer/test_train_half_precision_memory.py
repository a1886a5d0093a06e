"""Half precision keeps rotation's advantage in memory: an 8 B shape on 8 ranks, on fake tensors."""

from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.step_cost import step_costs
from gyre_trainer.training.config import TrainConfig, build


def test_an_8b_shape_in_bfloat16_needs_at_most_085_of_fsdp2() -> None:
    sections = {
        "run": {"out": "nowhere", "steps": 9},
        "data": {"dataset": "none", "batch_size": 8, "sequence_length": 8192},
        "model": {
            "vocab_size": 128256,
            "num_layers": 32,
            "dim": 4096,
            "num_heads": 32,
            "num_kv_heads": 8,
            "hidden_dim": 14336,
            "max_seq_len": 8192,
            "norm": "layer",
        },
        "precision": {"compute_dtype": "bfloat16"},
        "memory": {"recompute": "block"},
    }
    config = build(TrainConfig, sections, "")
    rotated, sharded = step_costs(
        [(config, each, 8) for each in (Strategy.GYRE, Strategy.FSDP2_SUB_BLOCK)]
    )
    assert rotated.peak_bytes <= 0.85 * sharded.peak_bytes
