"""A callback for Hugging Face's Trainer: its checkpoints keep a Loader's state.

Trainer(model, args, train_dataset=loader, callbacks=[LoaderState()])
"""

import base64
import functools
import logging
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from gyre_client.loader.loader import Loader

_log = logging.getLogger(__name__)


class LoaderState(TrainerCallback, ExportableState):
    """Saves the state of the Loader that is the `train_dataset`, and loads it on resuming.

    The Trainer itself would resume by reading and dropping batches; this callback switches that off
    (`ignore_data_skip`). Then it takes the first step after resuming for the first one of an epoch,
    so the callback corrects the `epoch` that it logs and saves.

    Attributes:
        cursor: The state that was loaded with a checkpoint, in base64; empty if there is none.
    """

    def __init__(self) -> None:
        self.cursor = ""
        self._loader: Loader | None = None
        # of an epoch: steps of the run before its resume, before the first epoch and in it
        self._resumed_in, self._done_before = 0.0, 0.0

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Makes the Trainer skip no batches by itself, and resume with its own batch size."""
        args.ignore_data_skip = True
        _wrap_trainer()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Loads the checkpoint's state into the Loader.

        Raises:
            TypeError: The `train_dataset` is no Loader.
        """
        self._loader = kwargs["train_dataloader"].dataset
        if not isinstance(self._loader, Loader):
            raise TypeError(
                f"LoaderState keeps the place of a Loader, but train_dataset is {self._loader!r}"
            )
        saved: Any = state.stateful_callbacks  # by the names of their classes
        cursor = (
            saved.get(type(self).__name__, {}).get("attributes", {}).get("cursor") or self.cursor
        )
        if cursor and state.global_step:
            self._loader.load_state_dict({"cursor": base64.b64decode(cursor)})
            self._resumed_in = _done(self._loader, args, state)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Notes whether this is the epoch that the run was resumed in."""
        self._done_before, self._resumed_in = self._resumed_in, 0.0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Adds what was done of the epoch before the run was resumed."""
        state.epoch = (state.epoch or 0.0) + self._done_before

    def state(self) -> dict[str, Any]:
        """Returns the Trainer's checkpoint of the loader."""
        cursor = b"" if self._loader is None else self._loader.state_dict()["cursor"]
        return {"args": {}, "attributes": {"cursor": base64.b64encode(cursor).decode()}}


def _wrap_trainer() -> None:
    """Makes Trainers over Loaders resume with the batch size of their arguments.

    transformers 4 takes that of the checkpoint, which differs on another number of ranks. It calls
    no callback before it asks for the DataLoader, and has no public name for the number in use.
    """
    get = Trainer.get_train_dataloader
    if hasattr(get, "knows_gyre"):
        return

    @functools.wraps(get)
    def get_train_dataloader(self: Any) -> Any:
        # auto_find_batch_size tries smaller ones, which a Loader refuses
        if isinstance(self.train_dataset, Loader) and not self.args.auto_find_batch_size:
            self._train_batch_size = self.args.train_batch_size
        return get(self)

    get_train_dataloader.knows_gyre = True  # type: ignore[attr-defined]
    Trainer.get_train_dataloader = get_train_dataloader


def _done(loader: Loader, args: TrainingArguments, state: TrainerState) -> float:
    """Returns how much of its epoch the resumed run has done, as the Trainer counts it."""
    accumulated = args.gradient_accumulation_steps
    try:
        num_batches = len(loader)
    except TypeError:  # without a length, all steps are one epoch to the Trainer
        return state.global_step / state.max_steps
    num_steps, rest = -(-num_batches // accumulated), num_batches % accumulated
    num_done = state.global_step % num_steps * accumulated
    if num_done and rest:
        _log.warning(
            "resumed inside an epoch of %d batches, which gradient_accumulation_steps=%d does "
            "not divide: the Trainer adds the last %d to the next epoch's first step. Resume "
            "from a checkpoint at the end of an epoch for the steps of an uninterrupted run",
            num_batches,
            accumulated,
            rest,
        )
    return num_done / num_batches
