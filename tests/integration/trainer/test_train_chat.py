"""The example that fine-tunes on conversations answers questions that it was not shown."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples/chat.py"


def test_held_out_questions_are_answered(tmp_path: Path) -> None:
    fewer = ["--nproc=1", "--set=run.threads=1", "--set=run.steps=90", "--set=eval.every=90"]
    environment = {name: value for name, value in os.environ.items() if name != "GYRE_ADDRESS"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--workdir", str(tmp_path), *fewer],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = map(float, re.findall(r"loss (\d[\d.]+)", done.stdout.splitlines()[0]))
    assert last < 1 < 3 < first, "a guess among forty words has 3.7"
    question, answer = re.findall(r"(?:backwards|answer:  ) (.*)", done.stdout)
    assert answer.split() == question.split()[::-1]
    (told,) = re.findall(rf"step 90: .*{question} .* \| (.*)", done.stderr)
    assert told == answer, "what the run sampled is what transformers says of the export"
