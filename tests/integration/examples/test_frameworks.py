"""The examples of other loops, stopped inside an epoch and resumed.

What each rank consumed is compared with the plan.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples import planned, run_example
from tests.preloaded.interpreter import Interpreter

# What the examples import, some seconds of each of their ranks.
IMPORTS = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "gyre_client.integrations.huggingface",
    "gyre_trainer.frameworks.huggingface",
    "gyre_trainer.rotate",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "lightning",
    "torchdata.stateful_dataloader",
    "webdataset",
)


@pytest.fixture(scope="module")
def imported() -> Iterator[Interpreter]:
    """An interpreter that has imported what is installed of `IMPORTS`."""
    interpreter = Interpreter(
        [name for name in IMPORTS if importlib.util.find_spec(name.partition(".")[0])]
    )
    yield interpreter
    interpreter.close()


@pytest.mark.parametrize(
    ("example", "needs", "num_ranks"),
    [
        ("stateful_dataloader", "torchdata", 1),
        ("webdataset_pipeline", "webdataset", 1),
        ("accelerate_loop", "accelerate", 2),
        ("huggingface_trainer", "transformers", 1),
        ("huggingface_trainer", "transformers", 2),
        ("lightning_loop", "lightning", 2),
    ],
)
def test_a_stopped_and_resumed_run_consumes_what_is_planned(
    example: str,
    needs: str,
    num_ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    imported: Interpreter,
) -> None:
    """The example of accelerate is started by torchrun itself."""
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    monkeypatch.delenv("GYRE_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    interpreter = None if example == "accelerate_loop" else imported
    run_example(example, tmp_path, num_ranks=num_ranks, interpreter=interpreter)
    for rank in range(num_ranks):
        consumed = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert consumed == planned(tmp_path, rank, num_ranks), f"rank {rank}"


@pytest.mark.parametrize("trainer", ["accelerate", "huggingface", "lightning"])
def test_trainers_take_a_rotated_model_as_one_of_fsdp2(
    trainer: str, tmp_path: Path, imported: Interpreter
) -> None:
    """The same loop: equal losses with accumulation and clipping, and the same ones resumed."""
    both = ("--shard", "rotation", "fsdp2")
    run_example(f"rotate_{trainer}", tmp_path, *both, num_ranks=2, interpreter=imported)
    losses = {}
    for shard in ("rotation", "fsdp2"):
        whole, resumed = json.loads((tmp_path / f"{shard}.json").read_text())
        assert resumed == pytest.approx(whole[len(whole) - len(resumed) :], rel=1e-7)
        assert 2 * len(resumed) == len(whole) >= 6
        losses[shard] = whole
    assert losses["rotation"] == pytest.approx(losses["fsdp2"], rel=1e-6)
