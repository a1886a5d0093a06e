"""A rank ends well although a thread of gloo still has tensors when its script is done."""

import os
import subprocess
import sys
from pathlib import Path

# The thread of gloo copies for some milliseconds. Then it waits for the interpreter's lock, to let
# go of the tensors, and this one does not give it away before its end. Gloo's thread is as late on
# a machine that leaves it no processor. Without a ring this process aborts.
LATE = """
import sys

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of

store = dist.FileStore(sys.argv[1], 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = make_mesh("cpu")
ring_of(mesh)
sent, received = torch.ones(2**23), torch.ones(2**23)
dist.all_gather([received], sent)
sys.setswitchinterval(1000)
dist.all_gather([received], sent, async_op=True)
sum(range(10**7))
dist.destroy_process_group()  # the mesh still has it
"""


def test_a_rank_ends_well_while_gloo_holds_tensors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE, str(tmp_path / "store")],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
