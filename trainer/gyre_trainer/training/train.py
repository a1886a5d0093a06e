"""A training run from its configuration to its report: the part of one rank."""

import hashlib
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gyre_client import Loader
from gyre_protos.text import counted

from gyre_trainer.comm.ring import Hop, collective
from gyre_trainer.errors import CheckpointRejected, Diverged
from gyre_trainer.layers.quantized import num_weights
from gyre_trainer.shards.layout import local_of
from gyre_trainer.training.build import build_model
from gyre_trainer.training.collate import collate
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.evaluation import loss_on_first
from gyre_trainer.training.history import StepStats, StepTimes
from gyre_trainer.training.rank_context import (
    RankContext,
    join_job,
    open_loader,
    peak_memory_bytes,
    require_one_place,
)
from gyre_trainer.training.recorder import RunFacts, RunRecorder, log_to
from gyre_trainer.training.run_checkpoints import Checkpoints, TrainState
from gyre_trainer.training.step import Stepper


def train(
    config: TrainConfig,
    resume: Path | None,
    *,
    init_from: Path | None = None,
    may_restart: bool = False,
) -> None:
    """Train until the last configured step, as one of the ranks that the environment names.

    Args:
        config: the run's configuration.
        resume: a checkpoint directory to resume from; None begins at step 0.
        init_from: the folder of the weights that a run begins with, instead of those that the
            configuration says; a resumed run does not read it.
        may_restart: whether a run that ended before its first checkpoint may begin again in its
            directory.

    Raises:
        TrainError: the run cannot be as it is configured.
        gyre_client.GyreError: the data is not available.
    """
    with join_job(config.run, tf32=config.precision.tf32) as context:
        log_to(Path(config.run.out), context.rank)
        data = config.data
        with open_loader(config, context, data.dataset, data.seed) as loader:
            training = Training(config, context, loader, None if resume else init_from)
            training.begin(resume, may_restart=may_restart)
            while training.step < config.run.steps:
                training.take()
            training.finish()


class Training:
    """One rank's part of a run.

    Attributes:
        step: the number of the next step.
    """

    def __init__(
        self, config: TrainConfig, context: RankContext, loader: Loader, weights: Path | None
    ) -> None:
        self.step = 0
        self._config = config
        self._context = context
        self._loader = loader
        self._stepper = Stepper(build_model(config, context, weights), config)
        self._checkpoints = Checkpoints(config)
        self._vocab_size = config.model.vocab_size
        self._stats = StepStats()
        self._recorder: RunRecorder | None = None
        self._step_began_s = 0.0  # of the step that runs now

    def begin(self, resume: Path | None, *, may_restart: bool) -> None:
        """Restore a checkpoint, if there is one to resume from, and open the run's records."""
        if resume:
            self.step = self._checkpoints.load(self._state(), resume)
            self._require_resumable(resume)
        require_one_place(self._loader.state_dict()["cursor"])
        if self._context.rank == 0:
            facts = RunFacts(
                self._loader.num_samples,
                self._context.world_size,
                num_weights(self._stepper.model),
                self._loader.step_of,
            )
            self._recorder = RunRecorder(self._config, facts, self.step, may_restart=may_restart)
        self._step_began_s = time.monotonic()

    def _require_resumable(self, path: Path) -> None:
        if self._loader.num_batches != self.step:
            raise CheckpointRejected(
                f"checkpoint {path} cannot be read: `step` is {self.step}, but its place in the "
                f"data is before step {self._loader.num_batches}. "
                "Resume from another one with --resume CHECKPOINT."
            )
        if self.step > self._config.run.steps:
            raise CheckpointRejected(
                f"checkpoint {path} is of step {self.step}, but `run.steps` is "
                f"{self._config.run.steps}; make `run.steps` larger"
            )

    def take(self) -> None:
        """Take one step on the next global batch; then record, evaluate and save as configured."""
        epoch, hops_waited_s = self._loader.epoch, Hop.waited_s
        wait_began_s = time.monotonic()
        batch = next(self._loader)
        waited_s = time.monotonic() - wait_began_s
        examples = collate(batch, self._config, self._vocab_size)
        _seed(self._config.run.seed, self.step, self._context.rank)
        loss_sum = self._stepper.take(examples, self.step)
        ended_s = time.monotonic()
        self._stats.add(
            loss_sum,
            StepTimes(ended_s - self._step_began_s, waited_s, Hop.waited_s - hops_waited_s),
            examples.num_targets(),
            batch,
            epoch,
        )
        self._step_began_s = ended_s
        self.step += 1
        self._after_step()

    def finish(self) -> None:
        """Write the report and the loss curve."""
        peaks = [0] * self._context.world_size
        with collective("the peaks of memory"):
            dist.all_gather_object(peaks, peak_memory_bytes(self._context.device))
        if self._recorder:
            self._recorder.finish(peaks, self._loader.epochs_passed)

    def _state(self) -> TrainState:
        return TrainState(self._stepper.model, self._stepper.optimizers, self._loader)

    def _after_step(self) -> None:
        config = self._config
        is_last = self.step == config.run.steps
        evaluates, saves, records = (
            every > 0 and (is_last or self.step % every == 0)
            for every in (config.eval.every, config.checkpoint.every, config.run.log_every)
        )
        if evaluates or saves or records:
            self._record()
        if evaluates:
            stepper, context = self._stepper, self._context
            loss = loss_on_first(config, context, stepper.model, stepper.loss, self._vocab_size)
            if self._recorder:
                self._recorder.add_evaluation(self.step, loss)
        if saves:
            self._require_finite_weights()
            if self._recorder:
                self._recorder.sync()
            with collective("writing a checkpoint"):
                self._checkpoints.save(self._state(), self.step)
        if evaluates or saves:
            self._step_began_s = time.monotonic()

    def _record(self) -> None:
        with collective("the records of the last steps"):
            records, ranks = self._stats.gather(
                self.step - len(self._stats), self._config, peak_memory_bytes(self._context.device)
            )
        if self._recorder:
            self._recorder.add(records, ranks, self._loader.state_dict()["cursor"])
        for record in records:
            if not math.isfinite(record.loss):
                raise Diverged(
                    f"the loss is {record.loss} at step {record.step}; "
                    "resume from a checkpoint with a lower `optimizer.lr`"
                )

    def _require_finite_weights(self) -> None:
        """Refuse to save weights that no run could go on with. A step's loss is of those before."""
        trained = [p for p in self._stepper.model.parameters() if p.requires_grad]
        # finite if all are; without a mask as large as a parameter
        sums = [local_of(each).detach().sum(dtype=torch.float64) for each in trained]
        total = torch.stack(sums).sum().cpu()
        with collective("whether all weights are finite"):
            dist.all_reduce(total)
        if not total.isfinite():
            raise Diverged(
                f"weights are not finite after {counted(self.step, 'step')}, so they are not "
                "saved; resume from a checkpoint with a lower `optimizer.lr`"
            )


def _seed(*numbers: int) -> None:
    """Let torch's generators begin where these numbers say.

    So a step drops out the same after a resume, and each rank in its own way.
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little"))
