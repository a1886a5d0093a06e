"""The example of a mixture reads as its schedule says."""

from pathlib import Path

from tests.examples import run_example


def test_the_example_reads_its_schedule(tmp_path: Path) -> None:
    done = run_example("mixture", tmp_path, "--steps", "16")
    lines = [line.split() for line in done.stdout.splitlines()]
    shares = [int(line[3].rstrip("%")) for line in lines if line[0] == "step"]
    assert len(shares) == 8
    assert min(shares[:4]) > 70
    assert max(shares[4:]) < 30
