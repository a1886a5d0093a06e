"""What `gyre plan` takes for a size, and for the stages of a job."""

import argparse

import pytest
from gyre_client.command.job_steps import add_plan_arguments


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("1MB", 10**6), ("1.5MiB", 3 << 19), ("2 GB", 2 * 10**9)],
)
def test_sizes_are_decimal_or_binary(text: str, num_bytes: int) -> None:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    assert parser.parse_args(["--batch-size", "1", "--io-block", text]).io_block == num_bytes


@pytest.mark.parametrize("text", ["", "MB", "1Mb", "-1", "1e6"])
def test_invalid_sizes_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--batch-size", "1", f"--io-block={text}"])
    assert "is no size: expected a number of bytes such as" in capsys.readouterr().err


def test_stages_are_epochs_and_samples(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    found = parser.parse_args(["--batch-size", "1", "--stages", "0:50,3:80"]).stages
    assert [(each.first_epoch, each.num_samples) for each in found] == [(0, 50), (3, 80)]
    for text in ("50", "0:50,", "0:-1", "a:b"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--batch-size", "1", f"--stages={text}"])
        assert "is not EPOCH:SAMPLES" in capsys.readouterr().err
