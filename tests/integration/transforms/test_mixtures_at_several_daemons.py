"""Other weights for a job whose ranks read at several daemons: at all of them or at none."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.transport.address import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

from tests.batches import Batch
from tests.conftest import Daemon, StartDaemon
from tests.mixtures import source_of, write_sources

G, CHANGE = 8, 30
MIXTURE = {"weights": {"web": 0.5, "code": 0.5}, "block": 16}
NAMES = ("run-of-a", "run-of-b")
GIVEN = f"--weights=code=1 --from-step={CHANGE}".split()


class Rank:
    """A rank of a job of two, and the daemon at which it reads."""

    def __init__(self, daemon: Daemon, number: int, job: str = "train") -> None:
        self.daemon = daemon
        self.loader = Loader(
            "all",
            batch_size=G,
            seed=5,
            rank=number,
            world_size=2,
            job=job,
            address=daemon.address,
            prefetch_batches=2,
        )
        self._batches: Iterator[Batch] = self.loader.stream()

    def take(self) -> list[str]:
        """The sources of the next batch."""
        return [source_of(value) for value in next(self._batches)["id"].tolist()]


@pytest.fixture
def ranks(gyred: StartDaemon, tmp_path: Path) -> Iterator[list[Rank]]:
    datasets = write_sources(tmp_path / "data")
    config: dict[str, Any] = {"datasets": datasets, "mixtures": {"all": MIXTURE}}
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(2):
            daemon = gyred({**config, "index_dir": str(tmp_path / f"index-{number}")})
            found.append(Rank(daemon, number))
            stack.callback(found[-1].loader.close)
        yield found


def mix(ranks: list[Rank], *jobs: str) -> int:
    """The exit status of `gyre mix` at the daemons of these ranks."""
    where = [f"--address={each.daemon.address}" for each in ranks]
    return main(["mix", "all", *GIVEN, *where, *(f"--job={each}" for each in jobs)])


def read(ranks: list[Rank], steps: range) -> list[list[str]]:
    """The sources of each global batch; all ranks have the same digest of their weights."""
    found: list[list[str]] = []
    digests: list[int] = []
    for _ in steps:
        found.append([source for each in ranks for source in each.take()])
        here = {each.loader.mixture_digest for each in ranks}
        assert len(here) == 1
        digests += here
    assert len(set(digests)) == 1 + (steps.start < CHANGE < steps.stop and "web" not in found[-1])
    return found


def test_all_daemons_of_a_job_change_the_weights(
    ranks: list[Rank], capsys: pytest.CaptureFixture[str]
) -> None:
    read(ranks, range(3))
    assert mix(ranks[:1]) == 2
    assert "rank 1 of 2 of the job do not read at this daemon now" in capsys.readouterr().err
    assert mix([*ranks, ranks[0]]) == 2
    assert "was given twice" in capsys.readouterr().err
    assert mix(ranks) == 0
    told = capsys.readouterr().out
    for each in ranks:
        assert f"{each.daemon.address}: 1 rank of the job train read all with" in told
    found = read(ranks, range(3, CHANGE + 4))
    assert all("web" in sources for sources in found[: CHANGE - 3])
    assert not any("web" in sources for sources in found[CHANGE - 3 :])
    assert main(["status", *(f"--address={each.daemon.address}" for each in ranks)]) == 2


@pytest.fixture
def named_ranks(ranks: list[Rank]) -> Iterator[list[Rank]]:
    """Ranks of another job at the same daemons, whose job has another name at each."""
    with contextlib.ExitStack() as stack:
        found = []
        for number, each in enumerate(ranks):
            found.append(Rank(each.daemon, number, NAMES[number]))
            stack.callback(found[-1].loader.close)
        yield found


def test_a_job_may_have_another_name_at_each_daemon(
    ranks: list[Rank], named_ranks: list[Rank], capsys: pytest.CaptureFixture[str]
) -> None:
    read(ranks, range(3))
    read(named_ranks, range(3))
    assert mix(named_ranks) == 2
    assert "name one" in capsys.readouterr().err
    assert mix(named_ranks, NAMES[0]) == 2
    assert "no job of yours named 'run-of-a' reads" in capsys.readouterr().err
    assert mix(named_ranks, *NAMES, "train") == 2
    assert "--job was given 3 times and --address 2 times" in capsys.readouterr().err
    assert mix(named_ranks, *NAMES) == 0
    told = capsys.readouterr().out
    for each, name in zip(ranks, NAMES, strict=True):
        assert f"{each.daemon.address}: 1 rank of the job {name} read all with" in told
    found = read(named_ranks, range(3, CHANGE + 4))
    assert not any("web" in sources for sources in found[CHANGE - 3 :])
    assert all("web" in sources for sources in read(ranks, range(3, CHANGE)))


def test_a_daemon_that_dies_in_between_leaves_all_with_the_old_weights(
    ranks: list[Rank], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read(ranks, range(3))
    change, dies = Connection.change_weights, ranks[1].daemon

    def change_and_kill(self: Connection, request: pb.ChangeWeightsRequest) -> Any:
        answer = change(self, request)
        if request.action == pb.WEIGHTS_ACTION_GIVE and dies.process:
            dies.kill()
        return answer

    monkeypatch.setattr(Connection, "change_weights", change_and_kill)
    assert mix(ranks) == 1
    told = capsys.readouterr().err
    assert "the change was taken back at the others" in told
    assert f"but {dies.address} (" in told
    dies.restart()
    found = read(ranks, range(3, CHANGE + 4))
    assert all("web" in sources for sources in found)
    monkeypatch.undo()
    for each in ranks:  # what was withdrawn stays so, and may be asked for again
        each.daemon.kill()
        each.daemon.restart()
    assert read(ranks, range(CHANGE + 4, CHANGE + 6))


def test_ranks_with_other_weights_have_another_digest(ranks: list[Rank]) -> None:
    """One daemon is given the change by itself, as no `gyre mix` does it."""
    read(ranks, range(3))
    with Connection(parse_address(ranks[0].daemon.address)) as connection:
        connection.change_weights(
            pb.ChangeWeightsRequest(
                dataset=pb.DatasetRef(name="all"), weights={"code": 1}, from_step=CHANGE
            )
        )
    read(ranks, range(3, CHANGE))
    for each in ranks:
        each.take()
    one, other = (each.loader.mixture_digest for each in ranks)
    assert one
    assert other
    assert one != other
