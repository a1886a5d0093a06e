"""`gyre-train trace`: a profiler's trace of a few steps on random tokens."""

from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from gyre_trainer.comm.spans import name_modules, span
from gyre_trainer.errors import ConfigError
from gyre_trainer.training.build import build_model
from gyre_trainer.training.collate import stand_in
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.rank_context import join_job
from gyre_trainer.training.step import Stepper

# The first step allocates the optimizer's states and the transient buffers, the second learns the
# order of modules in backward; a trace of either would not show a usual step.
_NUM_WARM_UP_STEPS = 2


def trace(config: TrainConfig, out: Path, num_steps: int) -> None:
    """Write ``out``/rank-R.json, a Chrome trace, as one of the ranks that the environment names.

    Raises:
        TrainError: the run cannot be as it is configured.
    """
    with join_job(config.run, tf32=config.precision.tf32) as context:
        config.require_divisible(context.world_size)
        model = build_model(config, context)
        name_modules(model)
        stepper = Stepper(model, config, span)
        num_rows = config.data.batch_size // context.world_size
        examples = stand_in(config, num_rows, seed=context.rank)
        for step in range(_NUM_WARM_UP_STEPS):
            stepper.take(examples, step)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (
            context.device.type == "cuda"
        )
        with profile(activities=activities) as profiler:
            for step in range(_NUM_WARM_UP_STEPS, _NUM_WARM_UP_STEPS + num_steps):
                with span(f"step {step}"):
                    stepper.take(examples, step)
        path = out / f"rank-{context.rank}.json"
        try:
            out.mkdir(parents=True, exist_ok=True)
            path.touch()  # torch itself would not say why it cannot write
        except OSError as error:
            raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from error
        profiler.export_chrome_trace(str(path))
