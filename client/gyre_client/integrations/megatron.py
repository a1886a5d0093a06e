"""The data iterator of Megatron-Core's schedules.

data = data_iterator("corpus", global_batch_size=512, micro_batch_size=4, seq_length=4096)
"""

from collections.abc import Mapping
from typing import Any, Self

from megatron.core import parallel_state

from gyre_client.integrations.micro_batches import MicroBatches
from gyre_client.loader.loader import Loader


class GyreIterator:
    """Micro-batches of one data-parallel rank, epoch after epoch; see `data_iterator`."""

    def __init__(self, batches: MicroBatches) -> None:
        """Reads nothing yet."""
        self._batches = batches
        self._parts = batches.iterate(endless=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        """Returns `tokens`, `labels`, `loss_mask`, `position_ids` and an empty `attention_mask`."""
        part = next(self._parts)
        return {
            "tokens": part.tokens,
            "labels": part.targets,
            "loss_mask": part.counts.float(),
            "position_ids": part.position,
            "attention_mask": None,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the Loader's state between two steps, the same on all ranks that read.

        Raises:
            InvalidRequest: Some micro-batches of the step were not taken yet.
        """
        return self._batches.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the step after that state the next one; it may be of other parallel sizes."""
        self._batches.load_state_dict(state_dict)
        self._parts = self._batches.iterate(endless=True)

    def close(self) -> None:
        """Ends the reading."""
        self._batches.loader.close()


def data_iterator(
    dataset: str,
    *,
    global_batch_size: int,
    micro_batch_size: int,
    seq_length: int,
    field: str = "tokens",
    **loader: Any,
) -> GyreIterator | None:
    """Returns this rank's iterator; None on pipeline stages between the first and the last.

    Ranks that differ only in their tensor, context or pipeline coordinate get the same
    micro-batches. Call it after `parallel_state.initialize_model_parallel`.

    Args:
        dataset: A name, a path or a URI.
        global_batch_size: Samples of a step over all ranks.
        micro_batch_size: Samples of a micro-batch on one rank.
        seq_length: Tokens of an input; rows of the data have one more.
        field: The field of token ids.
        loader: Other arguments of `gyre_client.Loader`.

    Raises:
        InvalidRequest: A rank's part of a step is not whole micro-batches.
    """
    if not (parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()):
        return None
    reader = Loader(
        dataset,
        batch_size=global_batch_size,
        rank=parallel_state.get_data_parallel_rank(),
        world_size=parallel_state.get_data_parallel_world_size(),
        **loader,
    )
    return GyreIterator(MicroBatches(reader, micro_batch_size, seq_length, field))
