"""Samples that worker processes transform, through a real daemon."""

import hashlib
import signal
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from gyre_client import Loader
from gyre_client.errors import (
    ConfigError,
    CorruptSample,
    CursorRejected,
    InvalidRequest,
    NotAllowed,
)
from numpy.testing import assert_array_equal

from tests.conftest import Daemon, GyredCommand, to_toml
from tests.daemons import WITH_STALL, status
from tests.probe_transforms import install
from tests.waiting import until

NUM_SAMPLES, LENGTH, KEPT, NUM_WORKERS = 101, 8, 3, 2
CROP = {"name": "crop_or_pad", "field": "tokens", "length": KEPT, "start": "random"}
CHAIN: Sequence[Mapping[str, Any]] = [{"name": "draw"}, CROP]
Batches = list[dict[str, np.ndarray[Any, Any]]]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that serves the dataset `set`, whose samples begin with their first token."""
    folder = tmp_path_factory.mktemp("transforms")
    (folder / "data").mkdir()
    np.arange(NUM_SAMPLES * LENGTH, dtype=np.uint16).tofile(folder / "data/a.bin")
    table = {
        "uri": str(folder / "data"),
        "format": "tokens",
        "dtype": "uint16",
        "sequence_length": LENGTH,
    }
    address, config = f"unix:{folder}/run/gyre.sock", folder / "gyre.toml"
    values = {
        "listen": [address],
        "index_dir": str(folder / "index"),
        "drain_timeout_s": 3.0,
        "transform_deadline_s": 3.0,
        "num_transform_workers": NUM_WORKERS,
        "installed_transforms": ["draw", "trouble", "growing", "no_transform", "absent"],
        "datasets": {"set": table, "cropped": table},
    }
    declared = "".join(f"\n[[datasets.cropped.transforms]]\n{to_toml(each)}" for each in CHAIN)
    config.write_text(to_toml(values) + declared)
    environment = {
        "PYTHONPATH": str(install(folder / "packages")),
        "AWS_SECRET_ACCESS_KEY": "which no transform may see",
    }
    command = ("-c", WITH_STALL.format(60.0))
    daemon = Daemon(config, address, folder / "log", environment, command)
    daemon.start()
    yield daemon
    daemon.stop()


def loader(
    daemon: Daemon, transform: Sequence[Mapping[str, Any]] | None = CHAIN, **arguments: Any
) -> Loader:
    values = {"batch_size": 12, "seed": 5, "epochs": None, "token_dtype": "stored", **arguments}
    return Loader("set", address=daemon.address, transform=transform, **values)


def take(source: Loader, num: int) -> Batches:
    return [
        {name: tensor.numpy().copy() for name, tensor in batch.items()}
        for batch in islice(source, num)
    ]


def joined(parts: Sequence[Batches]) -> Batches:
    """The global batches of several ranks."""
    return [
        {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        for batches in zip(*parts, strict=True)
    ]


def assert_equal(found: Batches, wanted: Batches) -> None:
    assert len(found) == len(wanted)
    for left, right in zip(found, wanted, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            assert_array_equal(left[name], right[name])


def expected(batches: Batches, seed: int = 5) -> Batches:
    """What the chain makes of the samples of these batches, with a new generator for each."""
    made: Batches = []
    for step, batch in enumerate(batches):
        made.append({name: np.empty_like(values) for name, values in batch.items()})
        for row, sample in enumerate(batch["sample_id"].tolist()):
            epoch = (step * len(batch["sample_id"]) + row) // NUM_SAMPLES
            key = hashlib.blake2b(struct.pack("<3Q", seed, epoch, sample), digest_size=16).digest()
            rng = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
            first = sample * LENGTH
            made[-1]["sample_id"][row] = sample
            made[-1]["first"][row] = first
            made[-1]["drawn"][row] = rng.random(3)
            begin = first + int(rng.integers(LENGTH - KEPT + 1))
            made[-1]["tokens"][row] = np.arange(begin, begin + KEPT)
    return made


@pytest.fixture(scope="module")
def reference(daemon: Daemon) -> Batches:
    """Thirty global batches, which go through three epochs."""
    with loader(daemon) as source:
        return take(source, 30)


def workers_of(daemon: Daemon) -> list[psutil.Process]:
    assert daemon.process
    found = []
    for each in psutil.Process(daemon.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if each.name() == "gyre-transform" and each.children() == []:
                found.append(each)
    return found


def test_samples_are_transformed_with_numbers_of_their_own(reference: Batches) -> None:
    assert list(reference[0]) == ["sample_id", "drawn", "first", "tokens"]
    assert_equal(reference, expected(reference))
    drawn = np.concatenate([batch["drawn"] for batch in reference])
    assert len(np.unique(drawn)) == drawn.size  # epochs differ, too


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_gets_the_same(
    daemon: Daemon, reference: Batches, world_size: int
) -> None:
    parts = []
    for rank in range(world_size):
        with loader(daemon, rank=rank, world_size=world_size) as source:
            parts.append(take(source, 10))
    assert_equal(joined(parts), reference[:10])


def test_a_job_that_resumes_gets_the_same(daemon: Daemon, reference: Batches) -> None:
    with loader(daemon) as source:
        assert_equal(take(source, 7), reference[:7])
        state = source.state_dict()
    parts = []
    for rank in range(2):
        with loader(daemon, rank=rank, world_size=2) as source:
            source.load_state_dict(state)
            parts.append(take(source, 8))
    assert_equal(joined(parts), reference[7:15])


def test_a_daemon_that_is_killed_costs_nothing(daemon: Daemon, reference: Batches) -> None:
    with loader(daemon) as source:
        begun = take(source, 3)
        daemon.kill()
        daemon.restart()
        assert_equal([*begun, *take(source, 17)], reference[:20])


def test_workers_that_are_killed_cost_no_sample(daemon: Daemon, reference: Batches) -> None:
    before = status(daemon).num_transform_workers_replaced
    slow = [{"name": "trouble", "slow_s": 0.02}, *CHAIN]
    with loader(daemon, slow) as source, loader(daemon, slow[:1]) as other:
        found = []
        for number in range(8):
            found += take(source, 1)
            take(other, 1)
            if number in (1, 4):
                until(lambda: workers_of(daemon))
                for process in workers_of(daemon):
                    process.send_signal(signal.SIGKILL)
    assert_equal(found, reference[:8])
    until(lambda: status(daemon).num_transform_workers_replaced > before)


def test_a_sample_that_kills_its_worker_is_named(daemon: Daemon, reference: Batches) -> None:
    poison = int(reference[4]["sample_id"][7])
    trouble = {"name": "trouble", "dies": [poison * LENGTH]}
    with loader(daemon, [trouble, *CHAIN]) as source, loader(daemon, [CROP]) as other:
        assert_equal(take(source, 4), reference[:4])
        with pytest.raises(CorruptSample, match="process that transformed it died") as caught:
            next(source)
        wanted = {"dataset": "set", "shard": "a.bin", "sample_id": str(poison)}
        wanted |= {
            "offset": str(poison * LENGTH * 2),
            "transform": "trouble or draw or crop_or_pad",
        }
        assert wanted.items() <= caught.value.facts.items()
        for left, right in zip(take(other, 6), reference, strict=False):
            assert_array_equal(left["sample_id"], right["sample_id"])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("refuses", "trouble: .* is refused"),
        ("allocates", "trouble: it needs too much memory"),
    ],
)
def test_a_sample_that_cannot_be_transformed_is_named(
    daemon: Daemon, reference: Batches, kind: str, reason: str
) -> None:
    poison = int(reference[2]["sample_id"][0])
    with loader(daemon, [{"name": "trouble", kind: [poison * LENGTH]}, *CHAIN]) as source:
        assert_equal(take(source, 2), reference[:2])
        with pytest.raises(CorruptSample, match=f"sample {poison} of dataset `set`.*{reason}"):
            next(source)


def test_a_sample_that_hangs_is_named_and_costs_other_jobs_nothing(
    daemon: Daemon, reference: Batches, tmp_path: Path
) -> None:
    """Its process is killed twice: with the group of the sample, and with the sample alone."""
    before = status(daemon).num_transform_workers_replaced
    poison = int(reference[2]["sample_id"][7])
    told = tmp_path / "processes"
    hangs = {"name": "trouble", "hangs": [poison * LENGTH], "file": str(told)}
    one = {"prefetch_batches": 1}  # of one epoch: in the next one the sample hangs once more
    with loader(daemon, [hangs, *CHAIN], **one) as source, loader(daemon, [CROP]) as other:
        assert_equal(take(source, 2), reference[:2])
        until(lambda: status(daemon).num_transform_workers_replaced > before)
        for left, right in zip(take(other, 6), reference, strict=False):
            assert_array_equal(left["sample_id"], right["sample_id"])
        with pytest.raises(CorruptSample) as caught:
            next(source)
        assert caught.value.facts["sample_id"] == str(poison)
        assert caught.value.facts["reason"] == "it took longer than 3 s (transform_deadline_s)"
        assert status(daemon).num_transform_workers_replaced >= before + 2
        hung = {int(line) for line in told.read_text().splitlines()}
        assert len(hung) == 2
        until(lambda: not hung & {each.pid for each in workers_of(daemon)})
        for left, right in zip(take(other, 6), reference[6:], strict=False):
            assert_array_equal(left["sample_id"], right["sample_id"])
    with loader(daemon) as source:
        assert_equal(take(source, 3), reference[:3])


def test_a_sample_that_hangs_when_lengths_are_measured_is_named(daemon: Daemon) -> None:
    trouble = {"name": "trouble", "hangs": [50 * LENGTH]}
    chain: list[Mapping[str, Any]] = [trouble, {"name": "growing", "field": "tokens"}]
    with pytest.raises(CorruptSample, match=r"sample 50 .*longer than 3 s"):
        loader(daemon, chain)


def test_jobs_of_one_order_and_chain_share_what_was_transformed(
    daemon: Daemon, reference: Batches
) -> None:
    before = status(daemon).num_samples_transformed
    options: dict[str, Any] = {"prefetch_batches": 2}
    with loader(daemon, **options) as first, loader(daemon, **options) as second:
        for batch in reference:
            assert_equal(take(first, 1), [batch])
            assert_equal(take(second, 1), [batch])
        num = status(daemon).num_samples_transformed - before
    assert num <= 12 * len(reference) * 3 / 2  # twice as many, if each had its own


def test_a_job_whose_transforms_are_slow_leaves_others_their_share(daemon: Daemon) -> None:
    """Each portion of the other one waits for a worker, and not for all portions before it."""
    slow = [{"name": "trouble", "slow_s": 0.05}, *CHAIN]
    with loader(daemon, seed=9, prefetch_batches=1) as other:
        take(other, 1)
        with loader(daemon, slow, seed=8, prefetch_batches=64, job="slow") as busy:
            take(busy, 1)

            def num_made() -> int:
                (its,) = (each for each in status(daemon).sessions if each.reader.job == "slow")
                return its.next_step + its.num_ready

            before = num_made()
            take(other, 3)
            assert num_made() - before < 32  # of 64, which were asked for first


def test_a_definition_declares_transforms_and_a_job_may_do_without(
    daemon: Daemon, reference: Batches
) -> None:
    arguments: dict[str, Any] = {"address": daemon.address, "batch_size": 12, "seed": 5}
    with Loader("cropped", token_dtype="stored", **arguments) as source:
        assert_equal(take(source, 3), reference[:3])
    with Loader("cropped", token_dtype="stored", transform=[], **arguments) as source:
        assert take(source, 1)[0]["tokens"].shape == (12, LENGTH)


def test_a_state_belongs_to_its_transforms(daemon: Daemon, reference: Batches) -> None:
    with loader(daemon, [CROP]) as source:
        take(source, 3)
        state = source.state_dict()
    for other in (CHAIN, [], [{**CROP, "length": 2}]):
        with loader(daemon, other) as source, pytest.raises(CursorRejected, match="otherwise"):
            source.load_state_dict(state)
    with loader(daemon, []) as source:
        plain = source.state_dict()
        assert b"transforms" not in plain["cursor"]
    with loader(daemon) as source:
        source.load_state_dict(state, changed_transforms=True)
        assert_equal(take(source, 2), reference[3:5])
        again = source.state_dict()
        source.load_state_dict(again)


@pytest.mark.parametrize(
    ("transform", "error", "reason"),
    [
        ([{"name": "sharpen"}], ConfigError, "no such transform; there are absent, cache, cast, "),
        ([{"name": "absent"}], ConfigError, "there is no such transform"),
        ([{"name": "no_transform"}], ConfigError, "is no Transform"),
        ([{"name": "os:system"}], NotAllowed, "runs no code that clients name"),
        ([{"name": "../x:y"}], ConfigError, "not of the form MODULE:CLASS"),
        ([{"length": 3}], InvalidRequest, "has no name"),
        ({"name": "draw"}, InvalidRequest, "must be a list of dicts"),
        ([{**CROP, "lengths": 3}], ConfigError, "did you mean `length`"),
        ([{**CROP, "length": 0}], ConfigError, "length in transforms.0. .crop_or_pad. is 0"),
        ([{**CROP, "value": 70000}], ConfigError, "which is no uint16"),
        ([{**CROP, "field": "text"}], ConfigError, "needs the field 'text'; there are tokens"),
        ([{"name": "center_crop", "size": 0}], ConfigError, "each length must be from 1"),
        ([{"name": "resize", "size": [3]}], ConfigError, "size in transforms.0. .resize. is"),
        ([CROP] * 129, ConfigError, "at most 128"),
    ],
)
def test_what_cannot_be_done_is_refused(
    daemon: Daemon, transform: Any, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        loader(daemon, transform)


def test_a_definition_with_an_unknown_transform_is_refused_at_the_start(
    daemon: Daemon, tmp_path: Path, gyred_command: GyredCommand
) -> None:
    config = tmp_path / "gyre.toml"
    text = daemon.config_path.read_text()
    config.write_text(text.replace('installed_transforms = ["draw", ', "installed_transforms = ["))
    refused = gyred_command("check-config", "--config", str(config))
    assert refused.returncode == 2
    assert "datasets.cropped: transforms[0] is 'draw', and there is no such" in refused.stderr
    config.write_text(text.replace('"name" = "draw"', '"name" = "os:system"'))
    refused = gyred_command("check-config", "--config", str(config))
    assert "datasets.cropped: transforms[0]: this daemon runs no code that" in refused.stderr


EMPTY = """
import numpy as np
from gyre_daemon.transforms import Field
from probe_transforms import Draw

class Empty(Draw):
    def outputs(self, fields):
        return {"empty": Field(np.dtype(np.float64), (0, 3))}
"""


def test_a_private_daemon_runs_classes_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = install(tmp_path / "packages")
    (packages / "empty.py").write_text(EMPTY)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    data = tmp_path / "data"
    data.mkdir()
    np.arange(800, dtype=np.uint16).tofile(data / "a.bin")
    arguments: dict[str, Any] = {
        "format": "tokens",
        "options": {"dtype": "uint16", "sequence_length": 8},
        "batch_size": 4,
    }
    with Loader(data, **arguments, transform=[{"name": "probe_transforms:Draw"}]) as source:
        batch = next(source)
        with pytest.raises(ConfigError, match=r"cannot be loaded: Expected `int` >= 1 .*shape"):
            Loader(data, **arguments, transform=[{"name": "empty:Empty"}])
    assert batch["first"].dtype == torch.int64 or batch["first"].dtype == torch.uint16
    assert_array_equal(batch["first"], batch["tokens"][:, 0])
    assert "probe_transforms" not in sys.modules
