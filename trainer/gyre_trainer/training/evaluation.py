"""The loss of a model on a dataset: some batches during a run, or each sample once afterwards."""

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gyre_protos.text import counted
from torch import Tensor, nn

from gyre_trainer.comm.ring import collective
from gyre_trainer.errors import ConfigError
from gyre_trainer.training.build import build_model, loss_of, restored
from gyre_trainer.training.collate import collate
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.losses import Loss
from gyre_trainer.training.rank_context import RankContext, join_job, open_loader, require_one_place
from gyre_trainer.training.recorder import log_to
from gyre_trainer.training.run_checkpoints import MANIFEST
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
        if (weights / MANIFEST).exists():
            model, step = restored(config, context, weights)
        else:
            model = build_model(config, context, weights)
        model.eval()
        with open_loader(
            config, context, config.eval.dataset, 0, is_evaluation=True, order="sequential"
        ) as loader:
            require_one_place(loader.state_dict()["cursor"])
            began_s = time.monotonic()
            loss, num_tokens, num_samples = _mean(
                model, loss_of(model), loader, config, config.model.vocab_size
            )
            elapsed_s = time.monotonic() - began_s
        if context.rank > 0:
            return
        perplexity = math.exp(min(loss, 700.0))
        if as_json:
            found = {
                "weights": str(weights),
                "step": step,  # None for a folder of weights
                "dataset": config.eval.dataset,
                "samples": num_samples,
                "tokens": num_tokens,
                "loss": loss,
                "perplexity": perplexity,
                "ranks": context.world_size,
                "elapsed_s": round(elapsed_s, 3),
            }
            print(json.dumps(found))
        else:
            print(
                f"{weights}: loss {loss:.6f}, perplexity {perplexity:.6g}, over "
                f"{counted(num_tokens, 'token', ',')} in {counted(num_samples, 'sample', ',')} of "
                f"{config.eval.dataset}"
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
    config: TrainConfig, context: RankContext, model: nn.Module, loss: Loss, vocab_size: int
) -> float:
    """The mean loss on the first batches of the evaluation's order; collective."""
    settings = config.eval
    with open_loader(
        config, context, settings.dataset, settings.seed, is_evaluation=True
    ) as loader:
        model.eval()
        mean, *_ = _mean(model, loss, islice(loader, settings.batches), config, vocab_size)
        model.train()
        return mean


@torch.no_grad()
def _mean(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Mapping[str, Tensor]],
    config: TrainConfig,
    vocab_size: int,
) -> tuple[float, int, int]:
    """The mean loss over all ranks' targets, their number, and that of samples.

    Raises:
        ConfigError: there are no targets.
    """
    total = torch.zeros(3, dtype=torch.float64)
    described: Any = getattr(model, "config", None)
    has_router_loss = getattr(described, "output_router_logits", False)
    if has_router_loss:  # a perplexity is of the tokens alone
        described.output_router_logits = False
    try:
        for batch in batches:
            is_sample = batch.get("mask")
            total[2] += len(batch["sample_id"]) if is_sample is None else int(is_sample.sum())
            examples = collate(batch, config, vocab_size)
            for part in examples.split(config.optimizer.accumulation_steps):
                total[0] += float(loss_sum(model, loss, part))
                total[1] += part.num_targets()
    finally:
        if has_router_loss:
            described.output_router_logits = True
    with collective("the loss of an evaluation"):
        dist.all_reduce(total)
    loss_of_all, num_targets, num_samples = total.tolist()
    if not num_targets:
        raise ConfigError("`eval.dataset` has no target: no sample has a token to predict")
    return loss_of_all / num_targets, int(num_targets), int(num_samples)
