"""The processes of a plan's dry runs end with it, however it ends."""

import os
import select
import signal
import subprocess
import sys

_HOLD = """
import os, sys, time
from gyre_trainer.accounting.step_cost import workers

def hold(_):
    os.write(int(sys.argv[1]), b"x")
    time.sleep(3600)

os.sched_getaffinity = lambda pid: {0, 1}
list(workers(2).map(hold, range(2)))
"""


def test_no_process_outlives_a_plan_that_is_killed() -> None:
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb", buffering=0) as alive:
        plan = subprocess.Popen([sys.executable, "-c", _HOLD, str(theirs)], pass_fds=[theirs])
        os.close(theirs)
        assert len(alive.read(1) + alive.read(1)) == 2
        plan.send_signal(signal.SIGKILL)
        plan.wait()
        assert select.select([alive], [], [], 120)[0]
        assert alive.read(1) == b"", "each process held the pipe open until it ended"
