"""A callback for Hugging Face's Trainer: its checkpoints keep a Loader's state.

Trainer(model, args, train_dataset=loader, callbacks=[LoaderState()])
"""

import base64
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from gyre_client.loader.loader import Loader


class LoaderState(TrainerCallback, ExportableState):
    """Saves the state of the Loader that is the `train_dataset`, and loads it on resuming.

    The Trainer itself would resume by reading and dropping batches; this callback switches that off
    (`ignore_data_skip`).

    Attributes:
        cursor: The state that was loaded with a checkpoint, in base64; empty if there is none.
    """

    def __init__(self) -> None:
        self.cursor = ""
        self._loader: Loader | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Makes the Trainer skip no batches by itself."""
        args.ignore_data_skip = True

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

    def state(self) -> dict[str, Any]:
        """Returns what the Trainer writes into its checkpoint."""
        cursor = b"" if self._loader is None else self._loader.state_dict()["cursor"]
        return {"args": {}, "attributes": {"cursor": base64.b64encode(cursor).decode()}}
