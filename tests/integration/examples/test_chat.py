"""The example that fine-tunes on conversations answers questions that it was not shown."""

import re
from pathlib import Path

from tests.examples import run_example


def test_held_out_questions_are_answered(tmp_path: Path) -> None:
    fewer = ["--nproc=1", "--set=run.threads=1", "--set=run.steps=90", "--set=eval.every=90"]
    done = run_example("chat", tmp_path, *fewer)
    first, last = map(float, re.findall(r"loss (\d[\d.]+)", done.stdout.splitlines()[0]))
    assert last < 1 < 3 < first, "a guess among forty words has 3.7"
    question, answer = re.findall(r"(?:backwards|answer:  ) (.*)", done.stdout)
    assert answer.split() == question.split()[::-1]
