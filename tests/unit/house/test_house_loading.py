"""What is loaded from files runs no code of theirs; people copy examples and pages."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
LOADS = re.compile(r"\btorch\.load\((?:[^()]|\([^()]*\))*\)|\bpickle\.loads?\(|\bjoblib\.load\(")
# what the daemon tells its own processes, and its tasks on a Ray cluster
OWN_PIPES = ("scans/server.py", "scans/tasks.py")
PLACES = ("README.md", "docs", "examples", "client", "daemon", "trainer", "benchmarks")


def test_every_load_is_of_plain_values() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *PLACES], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    paths = [ROOT / name for name in listed.split("\0") if name.endswith((".py", ".md"))]
    assert len(paths) > 300
    found = [
        (path.name, load)
        for path in paths
        if path.exists() and not path.as_posix().endswith(OWN_PIPES)
        for load in LOADS.findall(path.read_text())
    ]
    assert (
        "stateful_dataloader.py",
        'torch.load(workdir / "state.pt", weights_only=True)',
    ) in found
    assert [each for each in found if "weights_only=True" not in each[1]] == []
