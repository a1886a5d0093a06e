"""The loss of a model on a dataset: some batches during a run, or each sample once afterwards."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gyre_client import Loader
from gyre_protos.text import counted
from torch import Tensor, nn

from gyre_trainer.comm.ring import collective
from gyre_trainer.errors import ConfigError
from gyre_trainer.training import manifest
from gyre_trainer.training.build import build_model, loss_of, restored
from gyre_trainer.training.collate import Collator, collator_of
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.losses import Loss
from gyre_trainer.training.rank_context import RankContext, join_job, open_loader, require_one_place
from gyre_trainer.training.recorder import log_to
from gyre_trainer.training.step import loss_sum


def evaluate(config: TrainConfig, weights: Path, *, as_json: bool) -> None:
    """Print the loss on all of `eval.dataset`, as one of the ranks that the environment names.

    Args:
        config: as `on_any_ranks` gives it.
        weights: the directory of a checkpoint, or a folder of weights.
        as_json: whether an object is printed, in place of a line for people.

    Raises:
        TrainError: the weights or the data do not fit the configuration.
        gyre_client.GyreError: the data is not available.
    """
    with join_job(config.run) as context:
        log_to(Path(config.run.out), context.rank)
        step = None
        if (weights / manifest.NAME).exists():
            model, step = restored(config, context, weights)
        else:
            model = build_model(config, context, weights)
        model.eval()
        with open_loader(
            config, context, config.eval.dataset, 0, is_evaluation=True, order="sequential"
        ) as loader:
            require_one_place(loader.state_dict()["cursor"])
            began_s = time.monotonic()
            total = _total(model, loss_of(model), loader, collator_of(config))
            elapsed_s = time.monotonic() - began_s
        if context.rank == 0:
            loss = mean_loss(total)
            found = {
                "weights": str(weights),
                "step": step,  # None for a folder of weights
                "dataset": config.eval.dataset,
                "samples": int(total[2]),
                "tokens": int(total[1]),
                "loss": loss,
                "perplexity": math.exp(min(loss, 700.0)),
                "ranks": context.world_size,
                "elapsed_s": round(elapsed_s, 3),
            }
            print(json.dumps(found) if as_json else _told(found))


def _told(found: Mapping[str, Any]) -> str:
    """One line for people."""
    tokens, samples = (
        counted(found["tokens"], "token", ","),
        counted(found["samples"], "sample", ","),
    )
    return (
        f"{found['weights']}: loss {found['loss']:.6f}, perplexity {found['perplexity']:.6g}, over "
        f"{tokens} in {samples} of {found['dataset']}"
    )


def on_any_ranks(config: TrainConfig, num_ranks: int) -> TrainConfig:
    """The configuration of an evaluation whose result does not depend on the number of ranks.

    The global batch is rounded up to a multiple of the ranks. Padding of the last one has no loss.
    """
    rows = -(-config.data.batch_size // num_ranks) * num_ranks
    return replace(
        config,
        run=replace(config.run, replicas=1),
        data=replace(config.data, batch_size=rows, tail="pad"),
        optimizer=replace(config.optimizer, accumulation_steps=1),
    )


def loss_on_first(
    config: TrainConfig, context: RankContext, model: nn.Module, loss: Loss, collator: Collator
) -> float:
    """The mean loss on the first batches of the evaluation's order; collective."""
    settings = config.eval
    parts = config.optimizer.accumulation_steps
    with open_loader(
        config, context, settings.dataset, settings.seed, is_evaluation=True
    ) as loader:
        batches = islice(loader, settings.batches)
        model.eval()
        total = _total(model, loss, batches, collator, parts)
        model.train()
        return mean_loss(total)


def mean_loss(total: Tensor) -> float:
    """The mean over all targets.

    Raises:
        ConfigError: there are none.
    """
    if not total[1]:
        raise ConfigError("`eval.dataset` has no target: no sample has a token to predict")
    return float(total[0] / total[1])


@torch.no_grad()
def _total(
    model: nn.Module,
    loss: Loss,
    batches: "Loader | Iterator[Mapping[str, Tensor]]",
    collator: Collator,
    num_parts: int = 1,
) -> Tensor:
    """The loss summed over all ranks' targets, their number, and that of samples; float64."""
    total = torch.zeros(3, dtype=torch.float64)
    with _without_router_loss(model):
        for batch in batches:
            is_sample = batch.get("mask")
            total[2] += len(batch["sample_id"]) if is_sample is None else int(is_sample.sum())
            # of one step, so that windows of long documents do not depend on the size of batches
            for part in collator.collate(batch, step=0).split(num_parts):
                total[0] += float(loss_sum(model, loss, part))
                total[1] += part.num_targets()
    with collective("the loss of an evaluation"):
        dist.all_reduce(total)
    return total


@contextmanager
def _without_router_loss(model: nn.Module) -> Iterator[None]:
    """A context in which the loss is the tokens' alone: a perplexity has no router's in it."""
    described: Any = getattr(model, "config", None)
    has_loss = getattr(described, "output_router_logits", False)
    if has_loss:
        described.output_router_logits = False
    try:
        yield
    finally:
        if has_loss:
            described.output_router_logits = True
