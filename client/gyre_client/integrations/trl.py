"""TRL's trainers, with a Loader as `train_dataset` and as `eval_dataset`.

from gyre_client.integrations.trl import DPOTrainer, SFTTrainer
"""

from collections.abc import Sequence
from typing import Any

import torch
import trl
from datasets import Dataset
from torch import Tensor

from gyre_client.errors import InvalidRequest
from gyre_client.integrations.huggingface import LoaderState
from gyre_client.integrations.micro_batches import counted_tokens
from gyre_client.loader.loader import Loader

_IGNORED = -100  # of transformers: a label that no loss counts

Sample = dict[str, Tensor]


class _LoaderTrainer:
    """Reads Loaders in place of datasets that TRL prepares; their states are in checkpoints.

    TRL takes nothing but `datasets` at its start, and has no argument for data that is prepared
    already. So it prepares one row instead, and the Loaders take the row's place before the first
    step.
    """

    _row: dict[str, Any]

    def __init__(
        self,
        model: Any,
        args: Any,
        *,
        train_dataset: Loader,
        eval_dataset: Loader | None = None,
        callbacks: Sequence[Any] = (),
        **arguments: Any,
    ) -> None:
        """Makes TRL's trainer; all other arguments are its own.

        Args:
            model: As TRL takes it.
            args: An `SFTConfig` or a `DPOConfig`.
            train_dataset: Gives token ids; see `docs/integrations/huggingface.md`.
            eval_dataset: One with `restart=True`.
            callbacks: TRL's; `LoaderState` is added.
            arguments: Others of TRL's trainer.

        Raises:
            InvalidRequest: The arguments have TRL prepare a dataset, which is the daemon's work.
        """
        for name in ("packing", "precompute_ref_log_probs"):
            if getattr(args, name, False):
                raise InvalidRequest(
                    f"{name}: TRL would prepare the whole dataset before the first step (got "
                    f"True). Leave it out; the Loader's argument `pack` packs documents"
                )
        rows = Dataset.from_list([self._row])
        super().__init__(  # type: ignore[call-arg]
            model=model, args=args, train_dataset=rows,
            eval_dataset=None if eval_dataset is None else rows,
            callbacks=[LoaderState(), *callbacks], **arguments,
        )  # fmt: skip
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.args: Any
        self.args.remove_unused_columns = False  # the fields of a Loader have other names
        self.data_collator: Any
        self._collate_rows, self.data_collator = self.data_collator, self._collate

    def _collate(self, samples: list[Sample]) -> dict[str, Any]:
        if "mask" in samples[0]:
            raise InvalidRequest(
                "tail: samples that fill up the last batch would count (got 'pad'). Make the "
                "Loader with tail='drop'"
            )
        batch: dict[str, Any] = self._collate_rows([self._prepared(each) for each in samples])
        return batch

    def _prepared(self, sample: Sample) -> dict[str, Any]:
        """Returns a row as TRL's collator takes it."""
        raise NotImplementedError


class SFTTrainer(_LoaderTrainer, trl.SFTTrainer):
    """Fine-tunes on `tokens`, and counts those whose `loss_mask` is true.

    Packed rows keep their documents apart by position ids.
    """

    _row = {"input_ids": [0, 0], "labels": [0, 0]}  # noqa: RUF012

    def _collate(self, samples: list[Sample]) -> dict[str, Any]:
        batch = super()._collate(samples)
        if "position" in samples[0]:  # an attention mask would not tell documents apart
            del batch["attention_mask"]
            batch["position_ids"] = torch.stack([each["position"] for each in samples]).long()
        return batch

    def _prepared(self, sample: Sample) -> dict[str, Any]:
        tokens = sample["tokens"].long()
        counts = counted_tokens(sample, tokens)
        return {"input_ids": tokens.tolist(), "labels": tokens.where(counts, _IGNORED).tolist()}


class DPOTrainer(_LoaderTrainer, trl.DPOTrainer):
    """Learns preferences from `prompt_ids`, `chosen_ids` and `rejected_ids`."""

    _row = {"prompt": "a", "chosen": "b", "rejected": "c"}  # noqa: RUF012

    def _prepared(self, sample: Sample) -> dict[str, Any]:
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        return {name: sample[name].tolist() for name in names}
