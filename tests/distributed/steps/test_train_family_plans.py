"""Plans of the families that `benchmarks.rtp.models` measures, beside a step of two real ranks.

Small modules are replicated as by default, and FSDP2 wraps what the plan says it wraps.
"""

import gc

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.accounting.baselines import Strategy, distribute
from gyre_trainer.accounting.dry_run import dry_run
from gyre_trainer.accounting.step_cost import measure_step
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.shards.initialisation import materialize
from gyre_trainer.training.build import add_adapters
from gyre_trainer.training.collate import collator_of
from gyre_trainer.training.config import TrainConfig, build

from benchmarks.rtp.models import LORA, sizes_of
from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import FAMILIES

NUM_RANKS, NUM_ROWS, LENGTH = 2, 2, 64  # rows of each rank
VOCABULARY = 2048
SHARDING = (Strategy.GYRE, Strategy.FSDP2_SUB_BLOCK, Strategy.FSDP2_LAYER)
PLANNED = [each for each in (*FAMILIES, LORA) if each not in ("Bert", "T5")]  # causal ones
IN_EVERY_RUN = ("GPT2", LORA)
ROUTED = ("Mixtral", "Qwen3Moe", "GptOss")
Figures = dict[Strategy, tuple[int, int]]


def config(family: str) -> TrainConfig:
    import transformers

    name = "Llama" if family == LORA else family
    kind = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config").model_type
    keys = FAMILIES[name][1] | sizes_of(name) | {"model_type": kind}
    targets = [f"{each}_proj" for each in "qkvo"]
    lora = {"rank": 8, "targets": targets, "frozen": "float32"} if family == LORA else {}
    sections = {
        "run": {"out": "nowhere", "steps": 9},
        "data": {
            "dataset": "none",
            "batch_size": NUM_RANKS * NUM_ROWS,
            "sequence_length": LENGTH,
        },
        "model": {"config": keys, "lora": lora},
        # the default, which ranks of tests do not have; these adapters leave little else to rotate
        "memory": {"min_numel": 0 if lora else 2**18},
    }
    return build(TrainConfig, sections)


def measured(settings: TrainConfig) -> Figures:
    """By strategy: live bytes of this rank at the peak of a step, and the bytes that it sends."""
    found = {}
    # as a plan takes them to be: all differ, and lie evenly in the vocabulary
    tokens = torch.arange(5, VOCABULARY, VOCABULARY // (NUM_ROWS * LENGTH)).view(NUM_ROWS, LENGTH)
    tokens = torch.cat([tokens, tokens[:, :1]], 1)  # a last target
    batch = {
        "tokens": tokens,
        "sample_id": torch.arange(NUM_ROWS) + NUM_ROWS * dist.get_rank(),
    }
    for strategy in SHARDING:
        gc.collect()  # models before, of other tests too, keep a ring that may have larger buffers
        torch.manual_seed(0)
        model = distribute(settings, strategy, make_mesh("cpu"), torch.device("cpu"))
        if strategy is Strategy.GYRE:
            materialize(model, seed=0)
            add_adapters(model, settings)
        cost = measure_step(model, settings, collator_of(settings).collate(batch, 0))
        found[strategy] = cost.timeline.peak_bytes, cost.sent_bytes
        del model, cost
    return found


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=[] if each in IN_EVERY_RUN else pytest.mark.models)
        for each in PLANNED
    ],
)
def test_a_plan_has_the_bytes_of_a_step(family: str, ranks: StartRanks) -> None:
    settings = config(family)
    real = ranks(NUM_RANKS).run(measured, settings)[0]
    # what experts are chosen depends on values; elsewhere only the loader's rows are larger
    apart = 0.05 if family in ROUTED else 1e-3
    for strategy in SHARDING:
        plan, (peak, sent) = dry_run(settings, strategy, NUM_RANKS), real[strategy]
        assert plan.timeline.peak_bytes == pytest.approx(peak, rel=apart), strategy
        assert plan.sent_bytes == sent, strategy
