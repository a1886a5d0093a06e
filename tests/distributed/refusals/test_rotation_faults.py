"""A rank dies, is stopped or stands still: every other rank names it within the timeout."""

import contextlib
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import Hop
from gyre_trainer.errors import RingError
from gyre_trainer.layers.mlp import MLP
from gyre_trainer.rotate import rotate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from tests.distributed.conftest import StartRanks

TIMEOUT_S = 5.0  # ranks connect in this time, too, on a machine that may be busy
CULPRIT = 1


def told_when_one(fails_by: str) -> tuple[str | None, str | None]:
    """This rank's errors when one rank does not take part in a step, and at a second try."""
    mesh = DeviceMesh.from_group(
        dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)), "cpu", mesh_dim_names=("rotate",)
    )
    mlp = rotate(MLP(4, 8), mesh=mesh)
    x = torch.ones(2, 4)
    mlp(x).sum().backward()
    pids: list[int] = [0] * mesh.size()
    dist.all_gather_object(pids, os.getpid())
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == CULPRIT:
        _fail(fails_by, store, lambda: mlp(x))
        return None, None
    told = _told(mlp, x), _told(mlp, x)
    if store.add("told", 1) == mesh.size() - 1:
        store.set("all were told", "yes")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[CULPRIT], signal.SIGKILL)
    return told


def _fail(by: str, store: Store, step: Callable[[], object]) -> None:
    match by:
        case "dies in a hop":
            with patch.object(Hop, "wait", lambda _: os.kill(os.getpid(), signal.SIGKILL)):
                step()
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case _:
            store.wait(["all were told"])
            time.sleep(60)


def _told(mlp: torch.nn.Module, x: torch.Tensor) -> str | None:
    try:
        mlp(x).sum().backward()
    except RingError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("fails_by", "num_ranks", "symptom"),
    [
        ("dies", 2, "no sign of life within 5 s"),
        ("dies", 3, "no sign of life within 5 s"),
        ("dies in a hop", 3, "no sign of life within 5 s"),
        ("is stopped", 3, "no sign of life within 5 s"),
        ("stands still", 2, "alive, but it stands still"),
        ("stands still", 4, "alive, but it stands still"),
    ],
)
def test_every_rank_names_the_one_at_fault(
    ranks: StartRanks, fails_by: str, num_ranks: int, symptom: str
) -> None:
    told = ranks(num_ranks).run_to_the_end(told_when_one, fails_by)
    assert told.pop(CULPRIT) is None
    others = [rank for rank in range(num_ranks) if rank != CULPRIT]
    for rank, messages in zip(others, told, strict=True):
        for message in messages:
            assert message is not None
            assert message.startswith(f"rank {CULPRIT} is at fault: {symptom}"), message
            assert f"rank {rank}: " in message


def told_of_nan() -> str:
    """This rank's error in a backward under anomaly detection, after one that finds nothing."""
    mesh = DeviceMesh.from_group(
        dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)), "cpu", mesh_dim_names=("rotate",)
    )
    mlp = rotate(MLP(4, 8), mesh=mesh)
    x = torch.ones(2, 4, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the forward whose backward failed
        mlp(x).sum().backward()
        with pytest.raises(RuntimeError) as error:
            loss = mlp(x).sum()
            if dist.get_rank() == CULPRIT:
                loss = loss + (x * 0).sqrt().sum()  # whose backward comes first
            loss.backward()
    return str(error.value)


def test_anomaly_detection_names_nan_on_one_rank(ranks: StartRanks) -> None:
    told = ranks(3).run_to_the_end(told_of_nan)
    assert "'MulBackward0' returned nan values" in told.pop(CULPRIT)
    assert all(each.startswith(f"rank {CULPRIT} is at fault") for each in told)


def threads_that_answer() -> int:
    """How many threads of this rank answer for its ring, without the garbage collector."""
    gc.disable()
    mlp = rotate(MLP(4, 8), mesh=make_mesh("cpu"))
    mlp(torch.ones(2, 4)).sum().backward()
    return sum(each.name == "gyre hang diagnosis" for each in threading.enumerate())


def test_no_thread_answers_for_a_ring_that_has_ended(ranks: StartRanks) -> None:
    """It would say that this rank stands still, and every rank be at fault."""
    assert ranks(2).run_to_the_end(threads_that_answer) == [1, 1]
