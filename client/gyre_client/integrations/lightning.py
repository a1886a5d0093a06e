"""A DataModule for Lightning, whose checkpoints keep the place of its training data.

trainer.fit(model, GyreDataModule(train={"dataset": "corpus", "batch_size": 256}))
"""

from collections.abc import Mapping
from typing import Any

from lightning import LightningDataModule

from gyre_client.errors import InvalidRequest
from gyre_client.loader.loader import Loader

_EVALUATION = {"order": "sequential", "tail": "pad", "restart": True}


class GyreDataModule(LightningDataModule):
    """Makes the Loaders of a run, when its ranks know of each other.

    Lightning saves and loads the state of the training data with each checkpoint. A stage has one
    Loader for the whole run, so reading goes on where it was when Lightning asks for its loaders
    again, as with `reload_dataloaders_every_n_epochs`.
    """

    def __init__(
        self,
        *,
        train: Mapping[str, Any] | None = None,
        val: Mapping[str, Any] | None = None,
        test: Mapping[str, Any] | None = None,
        predict: Mapping[str, Any] | None = None,
        **common: Any,
    ) -> None:
        """Opens nothing yet.

        Args:
            train: Arguments of the `Loader` to train from, with `tail="drop"` unless they say more.
            val: Of the one to validate with. `val`, `test` and `predict` have each sample once, in
                order; where the last batch is filled up, its `mask` says so.
            test: Of the one to test with.
            predict: Of the one to predict from.
            common: Arguments of all four, such as `batch_size` and `address`.

        Raises:
            InvalidRequest: Training has no length: Lightning would take a batch ahead of each
                checkpoint, which a resumed run would lack.
        """
        super().__init__()
        evaluated = {"val": val, "test": test, "predict": predict}
        self._arguments = {
            stage: {**_EVALUATION, **common, **arguments}
            for stage, arguments in evaluated.items()
            if arguments is not None
        }
        if train is not None:
            self._arguments["train"] = {"tail": "drop", **common, **train}
            if self._arguments["train"].get("epochs", 1) is None:
                raise InvalidRequest(
                    "train: Lightning loses a batch at each resume of epochs without a length "
                    "(got epochs=None). Leave epochs out"
                )
        self._loaders: dict[str, Loader] = {}

    def train_dataloader(self) -> Any:
        """Returns the Loader to train from."""
        return self._loader("train")

    def val_dataloader(self) -> Any:
        """Returns the Loader to validate with; an empty list without `val`."""
        return self._loader("val")

    def test_dataloader(self) -> Any:
        """Returns the Loader to test with; an empty list without `test`."""
        return self._loader("test")

    def predict_dataloader(self) -> Any:
        """Returns the Loader to predict from; an empty list without `predict`."""
        return self._loader("predict")

    def _loader(self, stage: str) -> Any:
        if stage not in self._arguments:
            return []
        if stage not in self._loaders:
            self._loaders[stage] = Loader(**self._arguments[stage])
        return self._loaders[stage]
