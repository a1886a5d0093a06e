"""What the ranks of a run share, and what two runs never do."""

import os
from pathlib import Path

import pytest
import torch.distributed
from gyre_client.transport import run
from gyre_client.transport.run import Run, agreed, launched_as, this_run
from torch._C._distributed_c10d import HashStore  # torch.distributed does not declare it

LAUNCH = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "0"}


@pytest.fixture(autouse=True)
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two ranks, with a folder for temporary files that nobody else uses."""
    monkeypatch.setattr(run, "temporary_folder", lambda: tmp_path)
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)


class Rank(run._Membership):
    """What another process of the machine would have."""

    def end(self) -> None:
        """Does what the kernel does when the process is killed."""
        self._reset()


def test_ranks_of_a_run_on_a_machine_share_an_id_until_the_last_has_ended(tmp_path: Path) -> None:
    first, second, third = Rank(), Rank(), Rank()
    drawn = first.drawn
    assert first.on_node() == second.on_node() == drawn
    first.end()
    assert third.on_node() == drawn
    second.end()
    third.end()
    fourth = Rank()
    assert fourth.on_node() == fourth.drawn != drawn, "a run that is over is no run to join"
    (file,) = tmp_path.iterdir()
    fourth._leave(file)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [("MASTER_PORT", "29501"), ("TORCHELASTIC_RUN_ID", "exp"), ("SLURM_STEP_ID", "1")],
)
def test_launches_side_by_side_are_two_runs(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Rank()
    assert one.on_node() == one.drawn
    monkeypatch.setenv(name, value)
    other = Rank()
    assert other.on_node() == other.drawn
    one.end()
    third = Rank()
    assert third.on_node() == other.drawn
    assert len(list(tmp_path.iterdir())) == 1, "the file of the first is removed by the third"
    other.end()
    third.end()


def test_a_file_of_another_user_or_a_link_is_not_used(tmp_path: Path) -> None:
    path = run._meeting_file()
    assert path
    path.symlink_to(tmp_path / "elsewhere")
    rank = Rank()
    assert rank.on_node() == rank.drawn
    assert not (tmp_path / "elsewhere").exists()


def test_a_process_that_was_started_alone_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Rank().on_node() == ""
    assert this_run() == this_run()
    assert not list(tmp_path.iterdir())


def test_the_first_rank_decides_and_no_rank_waits() -> None:
    """Through torch's private name of the default store, whose parent a fork never talks to."""
    assert agreed("key", "alone") == "alone"
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        assert launched_as() == (0, 1)
        assert agreed("key", "first") == "first"
        assert agreed("key", "second") == "first"
        child = os.fork()
        if not child:
            os._exit(agreed("key", "forked") != "forked")
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "job-12ab"),
        ({"TORCHELASTIC_RUN_ID": "exp 7", "SLURM_JOB_ID": "1"}, "exp 7"),
        ({"TORCHELASTIC_RUN_ID": "a\nb", "SLURM_JOB_ID": "81"}, "81"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "81", "SLURM_STEP_ID": "0"}, "81.0"),
    ],
)
def test_a_run_has_the_name_that_its_launcher_gave_it(
    environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert Run("12ab", "34cd").name == name
