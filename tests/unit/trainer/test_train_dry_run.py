"""A dry run of more ranks than there are cores divides memory and counts bytes by the formula."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.counters import CATEGORIES, Category
from gyre_trainer.accounting.step_cost import dry_run, on_fake_ranks
from gyre_trainer.cli import parse
from gyre_trainer.errors import ConfigError
from gyre_trainer.rotate import rotate_all
from gyre_trainer.training.build import plain
from gyre_trainer.training.config import TrainConfig, build

MODEL = {
    "vocab_size": 1024,
    "num_layers": 1,
    "dim": 64,
    "num_heads": 16,
    "num_kv_heads": 16,
    "hidden_dim": 256,
    "max_seq_len": 16,
}


def config(*, memory: dict[str, Any] | None = None, **optimizer: Any) -> TrainConfig:
    sections = {
        "run": {"out": "nowhere", "steps": 9},
        "data": {"dataset": "none", "batch_size": 32, "sequence_length": 16},
        "model": MODEL,
        "optimizer": optimizer,
        "memory": {"min_numel": 0} if memory is None else memory,
    }
    return build(TrainConfig, sections, "")


def num_bytes(settings: TrainConfig) -> tuple[int, int]:
    """Bytes of the parameters that rotate, and of those that do not."""
    model = plain(settings.model)
    norms = sum(parameter.nbytes for name, parameter in model.named_parameters() if "norm" in name)
    return sum(parameter.nbytes for parameter in model.parameters()) - norms, norms


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_rotated_rank_keeps_an_nth_and_sends_the_fewest_bytes(num_ranks: int) -> None:
    settings = config(clip_norm=0.0)
    rotated, norms = num_bytes(settings)
    cost = dry_run(settings, Strategy.GYRE, num_ranks)
    live = cost.timeline.at(-1)
    own = rotated // num_ranks + norms
    identities = 16 * 4  # next to the shard of each module that rotates
    assert live[Category.PARAMETERS] == own + identities
    num_tensors = len(list(plain(settings.model).parameters()))
    assert live[Category.OPTIMIZER] == 2 * own + 4 * num_tensors
    assert live[Category.GRADIENTS] == 0
    num_rows, width = MODEL["vocab_size"], MODEL["dim"]
    num_tokens = 32 * 16 // num_ranks
    share = (num_ranks - 1) / num_ranks
    num_norms = sum("norm" in name for name, _ in plain(settings.model).named_parameters())
    # and of each whether any rank has a gradient, and whether all train it
    averaged = norms + 2 * 4 * num_norms
    # all ranks have fewer tokens than the embedding has rows, so ids and rows travel, not slices
    assert num_tokens * num_ranks < num_rows
    of_slices = 3 * (rotated - 4 * num_rows * width) + 2 * averaged
    of_rows = (num_ranks - 1) * num_tokens * (8 + 2 * 4 * width)
    assert cost.sent_bytes == share * of_slices + of_rows


def test_small_modules_are_replicated_unless_the_configuration_says_otherwise() -> None:
    by_slice, replicated, default = (
        dry_run(config(memory=memory), Strategy.GYRE, 2).timeline.at(-1)[Category.PARAMETERS]
        for memory in ({"min_numel": 0}, {"min_numel": 2**18}, {})
    )
    assert default == replicated == sum(num_bytes(config()))
    assert by_slice < default


def test_ddp_keeps_everything_on_every_rank() -> None:
    settings = config(clip_norm=0.0)
    cost = dry_run(settings, Strategy.DDP, 8)
    live = cost.timeline.at(-1)
    assert live[Category.PARAMETERS] == live[Category.GRADIENTS] == sum(num_bytes(settings))
    assert cost.sent_bytes == 2 * 7 / 8 * sum(num_bytes(settings))


@pytest.mark.parametrize("strategy", Strategy)
def test_the_phases_stand_in_the_timeline_and_the_peak_is_made_of_its_categories(
    strategy: Strategy,
) -> None:
    timeline = dry_run(config(accumulation_steps=2), strategy, 4).timeline
    marks = [
        event
        for event in timeline.events
        if event in ("step", "forward", "backward", "clip", "update")
    ]
    assert marks == ["step", "forward", "backward", "forward", "backward", "clip", "update"]
    assert sum(timeline.peak().values()) == timeline.peak_bytes == timeline.live.sum(axis=1).max()


def test_recomputation_leaves_less_alive_and_sends_the_same() -> None:
    keeps, recomputes = (
        dry_run(config(memory={"recompute": flag, "min_numel": 0}), Strategy.GYRE, 4)
        for flag in ("none", "block")
    )
    assert (
        recomputes.timeline.peak()[Category.ACTIVATIONS]
        < 0.6 * keeps.timeline.peak()[Category.ACTIVATIONS]
    )
    assert recomputes.sent_bytes == keeps.sent_bytes


def test_a_model_whose_embeddings_keep_no_configuration_can_be_planned() -> None:
    """BERT's have buffers, which the constructor computes again from the model's configuration."""
    keys = {"model_type": "bert", "is_decoder": True, "vocab_size": 1024, "hidden_size": 64}
    keys |= {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    sections = {
        "run": {"out": "nowhere", "steps": 9},
        "data": {"dataset": "none", "batch_size": 4, "sequence_length": 16},
        "model": {"config": keys},
        "memory": {"min_numel": 0},
    }
    settings = build(TrainConfig, sections, "")
    total = sum(num_bytes(settings))
    gyre, ddp = (
        dry_run(settings, each, 2).timeline.at(-1)[Category.PARAMETERS]
        for each in (Strategy.GYRE, Strategy.DDP)
    )
    assert ddp == total
    assert total / 2 <= gyre < 0.52 * total


def test_a_plan_finds_the_blocks_that_training_finds() -> None:
    """LFM2 generates with a cache of its own, so its attention is no block."""
    keys = {"model_type": "lfm2", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    keys |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    keys |= {"layer_types": ["conv", "full_attention"], "block_multiple_of": 4}
    sections = {
        "run": {"out": "nowhere", "steps": 9},
        "data": {"dataset": "none", "batch_size": 4, "sequence_length": 16},
        "model": {"config": keys},
        "memory": {"min_numel": 0},
    }
    settings = build(TrainConfig, sections, "")
    with torch.device("meta"):
        model = plain(settings.model)
    with on_fake_ranks(2) as mesh:
        rotate_all(model, mesh=mesh, min_numel=0)
    rotated = {path for path, each in model.named_modules() if type(each).__name__[:7] == "Rotated"}
    assert rotated


def test_a_refusal_leaves_no_group_behind() -> None:
    with pytest.raises(ConfigError, match="multiple of 3"):
        dry_run(config(), Strategy.GYRE, 3)
    with pytest.raises(RuntimeError, match="in the middle"), on_fake_ranks(4):
        raise RuntimeError("in the middle")
    assert not dist.is_initialized()


def test_bfloat16_halves_the_residual_stream_too() -> None:
    """At the peak of the backward pass, mostly inputs of norms are alive."""

    def activations(dtype: str) -> int:
        sections = {
            "run": {"out": "nowhere", "steps": 9},
            "data": {"dataset": "none", "batch_size": 4, "sequence_length": 512},
            "model": MODEL | {"max_seq_len": 512, "norm": "layer", "vocab_size": 32},
            "precision": {"compute_dtype": dtype},
            "memory": {"recompute": "block"},
        }
        live = dry_run(build(TrainConfig, sections, ""), Strategy.GYRE, 2).timeline.live
        return int(live[:, CATEGORIES.index(Category.ACTIVATIONS)].max())

    assert activations("bfloat16") < 0.6 * activations("float32")


def test_a_plan_of_a_million_tokens_is_asked_for_and_more_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["plan", "--model", "none", "--batch", "8", "--sequence"]
    assert parse([*arguments, "1048576"]).sequence == 2**20
    with pytest.raises(SystemExit):
        parse([*arguments, "1048577"])
    assert "1048577 is not above 0 and up to 1048576" in capsys.readouterr().err


def test_activations_of_a_million_tokens_are_counted() -> None:
    """They grow with the length, not with its square; the peak may be at another moment."""
    keys = {"model_type": "llama", "vocab_size": 64, "num_hidden_layers": 1, "hidden_size": 32}
    model = keys | {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}

    def activations(length: int) -> int:
        data = {"dataset": "none", "batch_size": 2, "sequence_length": length}
        run = {"out": "nowhere", "steps": 9}
        settings = build(TrainConfig, {"run": run, "data": data, "model": {"config": model}}, "")
        return dry_run(settings, Strategy.DDP, 2).timeline.peak()[Category.ACTIVATIONS]

    assert 0.9 < activations(2**20) / (16 * activations(2**16)) < 1.2  # with chunks of logits
