"""torchtitan's data loader, read from Gyre.

dataloader=GyreDataLoader.Config(dataset="corpus", global_batch_size=512)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX

from gyre_client.integrations.micro_batches import MicroBatches
from gyre_client.loader.loader import Loader


class GyreDataLoader(BaseDataLoader):
    """Inputs and targets of one data-parallel rank, in micro-batches of `local_batch_size`.

    Ranks that differ only in their tensor, context or pipeline coordinate get the same batches.
    torchtitan's checkpoint keeps the Loader's state. A run that resumes with another data-parallel
    degree has the global batches that it would have had.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Which data is read; `dataset` is a name, a path or a URI."""

        global_batch_size: int = -1
        """Samples of a step over all ranks: `training.global_batch_size`. -1 for one micro-batch
        of each rank; the state then fits no other number of ranks."""

        infinite: bool = True
        """Whether epochs follow each other without an end. If not, the last batch is filled up
        with samples that no loss counts, so all ranks have equally many."""

        tokens: str = "tokens"
        """The field that has rows of `training.seq_len` + 1 token ids."""

        loader: dict[str, Any] = field(default_factory=dict)
        """Other arguments of `gyre_client.Loader`, such as `seed`, `pack` or `options`."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        """Opens the dataset; torchtitan's Trainer and Validator pass the arguments."""
        batch_size = config.global_batch_size
        arguments = {"tail": "wrap" if config.infinite else "pad", **config.loader}
        loader = Loader(
            config.dataset_path or config.dataset,
            batch_size=local_batch_size * dp_world_size if batch_size < 0 else batch_size,
            rank=dp_rank,
            world_size=dp_world_size,
            **arguments,
        )
        self._infinite = config.infinite
        self._batches = MicroBatches(loader, local_batch_size, seq_len, config.tokens)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for part in self._batches.iterate(endless=self._infinite):
            labels = part.targets.masked_fill(~part.counts, IGNORE_INDEX)
            yield {"input": part.tokens, "positions": part.position}, labels

    def state_dict(self) -> dict[str, Any]:
        """Returns the Loader's state, which is the same on all ranks."""
        return self._batches.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a state's place; an empty one leaves the loader at the beginning."""
        if state_dict:
            self._batches.load_state_dict(state_dict)
