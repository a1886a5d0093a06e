"""Rotated models in Hugging Face's Trainer."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from gyre_trainer import pretrained
from gyre_trainer.errors import RotationError
from gyre_trainer.frameworks.accelerate import load_optimizer, save_optimizer
from gyre_trainer.layers.causal_loss import takes_causal_loss
from gyre_trainer.rotate import causal_loss

_OPTIMIZER, _SCHEDULE = "optimizer_shards", "scheduler.pt"


class ShardedTrainer(Trainer):  # type: ignore[misc,unused-ignore]
    """A Trainer for a model of `transformers` that is rotated, or sharded by FSDP2.

    Checkpoints and the saved model have the library's layout; each rank writes its part of the
    files, and any number of ranks can resume. Of a model with adapters of peft these are saved, in
    peft's layout. The loss of a rotated language model goes by slices of the vocabulary, as
    `causal_loss` has it. All logits exist where something reads them, as `compute_metrics` does,
    with label smoothing, and for models whose loss `causal_loss` does not know.

    Raises:
        RotationError: the arguments have `bf16` or `fp16`, which are for whole weights.

    Example:
        args = TrainingArguments(...)
        rotate_all(model, mesh=make_mesh(args.device.type))
        ShardedTrainer(model, args, train_dataset=dataset).train()
    """

    accelerator: Any
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    _wants_loss_only = False

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator that puts no DistributedDataParallel around models."""
        if self.args.bf16 or self.args.fp16:
            raise RotationError(
                "TrainingArguments(bf16=True) and fp16 are for whole weights; "
                "take RotationPolicy(compute_dtype=torch.bfloat16)"
            )
        super().create_accelerator_and_postprocess()  # type: ignore[no-untyped-call]
        prepare = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.prepare_model = prepare

    def get_train_dataloader(self) -> Any:
        """The DataLoader; a resumed run has the batch size of its own arguments.

        transformers 4 takes that of the checkpoint, which differs on another number of ranks.
        """
        if not self.args.auto_find_batch_size:
            self._train_batch_size = self.args.train_batch_size  # has no public name
        return super().get_train_dataloader()

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss, by slices of the vocabulary where nothing reads the logits."""
        reads_logits = return_outputs and not self._wants_loss_only
        if reads_logits or not self._takes_causal_loss(inputs):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        batch = dict(inputs)
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            batch["num_items_in_batch"] = num_items_in_batch
        loss = causal_loss(model, batch)
        if "num_items_in_batch" in batch and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # the number is that of all ranks
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """The loss of an evaluation, and the logits unless only the loss is wanted."""
        self._wants_loss_only = prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._wants_loss_only = False

    def _takes_causal_loss(self, inputs: dict[str, Any]) -> bool:
        other = self.compute_loss_func is not None or self.label_smoother is not None
        return not other and inputs.get("labels") is not None and takes_causal_loss(self.model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as `save_pretrained` does; collective."""
        folder = output_dir or self.args.output_dir
        pretrained.save_pretrained(self.model, folder)
        tokenizer = self.processing_class
        if self.args.should_save and tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        pretrained.load(model or self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer(self.model, self.optimizer.optimizer, Path(output_dir) / _OPTIMIZER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            folder = Path(checkpoint)
            load_optimizer(self.model, self.optimizer.optimizer, folder / _OPTIMIZER)
            self.lr_scheduler.load_state_dict(torch.load(folder / _SCHEDULE, weights_only=True))
