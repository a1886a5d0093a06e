"""Functions of a script as transforms of a private daemon."""

import functools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import CorruptSample, CursorRejected, GyreError, InvalidRequest

from tests.conftest import StartDaemon
from tests.integration.transforms.sample_functions import (
    count,
    ends_the_worker,
    fails_late,
    grows_late,
    never_ends,
    noisy,
    scaled,
)

NUM_SAMPLES = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "lines.txt"
    path.write_text("".join(f"{'x' * number}\n" for number in range(1, NUM_SAMPLES + 1)))
    return path


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """One private daemon for the module; its workers are given up on after 20 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GYRE_TRANSFORM_DEADLINE_S", "20")
        yield


def load(data: Path, *transform: Any, **options: Any) -> list[dict[str, Any]]:
    arguments = {"batch_size": 4, "order": "sequential", "tail": "drop", **options}
    with Loader(data, transform=list(transform), **arguments) as loader:
        return list(loader)


def column(batches: list[dict[str, Any]], name: str) -> list[Any]:
    return [value for batch in batches for value in batch[name].tolist()]


def test_a_function_takes_a_sample_and_returns_another_one(data: Path) -> None:
    batches = load(data, count)
    assert set(batches[0]) == {"sample_id", "length", "twice"}, "fields not returned are dropped"
    assert column(batches, "length") == list(range(1, NUM_SAMPLES + 1))
    assert batches[0]["twice"].shape == (4, 2, 3)


def test_a_lambda_follows_a_declared_transform_and_precedes_another(data: Path) -> None:
    crop = {"name": "crop_or_pad", "field": "text", "length": 5}
    double = lambda sample: {"text": np.repeat(sample["text"], 2)}  # noqa: E731
    batches = load(data, crop, double, {"name": "cast", "field": "text", "dtype": "float32"})
    assert batches[0]["text"].shape == (4, 10)
    assert batches[0]["text"][0].tolist() == [120.0, 120.0] + [0.0] * 8


def test_lengths_are_measured_or_bounded(data: Path) -> None:
    def tokens(sample: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": sample["text"].astype(np.int32)}

    measured = load(data, {"name": tokens, "max_length": {"tokens": None}})
    assert measured[0]["tokens.offsets"].tolist() == [0, 1, 3, 6, 10]
    bounded = load(data, {"name": tokens, "max_length": {"tokens": 3}})
    assert bounded[0]["tokens"].tolist()[1] == [120, 120, 0]
    with pytest.raises(CorruptSample, match=r"'max_length': \{'tokens': N\}\}; None for N"):
        load(data, tokens)
    with pytest.raises(InvalidRequest, match="max_length names 'other'"):
        load(data, {"name": tokens, "max_length": {"other": 3}})
    with pytest.raises(InvalidRequest, match="no option 'length'"):
        load(data, {"name": tokens, "length": 3})


def test_a_sample_of_another_length_than_was_measured_is_refused(data: Path) -> None:
    def tokens(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"tokens": np.arange(rng.integers(1, 1000))}

    with pytest.raises(CorruptSample, match="lengths must not depend on chance"):
        load(data, {"name": tokens, "max_length": {"tokens": None}}, seed=1)


def test_random_numbers_follow_the_seed_and_the_epoch(data: Path) -> None:
    first, again = (column(load(data, noisy, epochs=2), "noise") for _ in range(2))
    assert first == again
    assert len(set(first)) == 2 * NUM_SAMPLES
    assert first != column(load(data, noisy, epochs=2, seed=1), "noise")


def test_functions_that_captured_other_values_share_no_batches(data: Path) -> None:
    """Their source is the same."""
    transforms = [[scaled(factor)] for factor in (2, 3)]
    arguments: dict[str, Any] = {"batch_size": 4, "order": "sequential"}
    with (
        Loader(data, transform=transforms[0], **arguments) as twice,
        Loader(data, transform=transforms[1], **arguments) as thrice,
    ):
        for two, three in zip(twice, thrice, strict=True):
            assert (two["scaled"] * 3).tolist() == (three["scaled"] * 2).tolist()


def test_a_large_closure_reaches_the_workers_once(data: Path) -> None:
    table = np.arange(8 << 20, dtype=np.int64)  # 64 MiB: far more than a message may have

    def look_up(sample: dict[str, Any]) -> dict[str, Any]:
        return {"found": table[-len(sample["text"])], "worker": os.getpid()}

    assert column(load(data, look_up), "found") == [len(table) - n for n in range(1, 13)]


def test_changed_code_is_refused_unless_said(data: Path) -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "order": "sequential"}
    with Loader(data, transform=[scaled(2)], **arguments) as loader:
        next(loader)
        state = loader.state_dict()
    with Loader(data, transform=[scaled(2)], **arguments) as loader:
        loader.load_state_dict(state)
        assert next(loader)["scaled"].tolist() == [10, 12, 14, 16]
    with Loader(data, transform=[scaled(5)], **arguments) as loader:
        with pytest.raises(CursorRejected):
            loader.load_state_dict(state)
        loader.load_state_dict(state, changed_transforms=True)
        assert next(loader)["scaled"].tolist() == [25, 30, 35, 40]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (
            fails_late,
            r"KeyError: 'the line that helps' \(.*sample_functions.py, line \d+: raise Key",
        ),
        (grows_late, r"'pair' is float64 \[3\], and was float64 \[2\]"),
        (ends_the_worker, "python"),
        (never_ends, "python"),
    ],
)
def test_a_sample_that_fails_is_named(data: Path, function: Any, told: str) -> None:
    """The first samples that fields are learnt from are not the last one of the file."""
    arguments: dict[str, Any] = {"batch_size": 4, "order": "sequential"}
    with (
        Loader(data, transform=[function], **arguments) as loader,
        pytest.raises(CorruptSample, match=told) as caught,
    ):
        for _ in loader:
            pass
    assert int(caught.value.facts["sample_id"]) >= 9


def test_a_restart_begins_again_after_an_error_at_its_first_batch(
    data: Path, tmp_path: Path
) -> None:
    missing = str(tmp_path / "weights")
    Path(missing).touch()

    def counted(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": len(sample["text"]) + len(Path(missing).read_bytes())}

    with Loader(data, batch_size=12, order="sequential", restart=True, transform=[counted]) as it:
        Path(missing).unlink()
        with pytest.raises(CorruptSample, match="No such file"):
            next(iter(it))
        Path(missing).touch()
        assert next(iter(it))["x"].tolist() == list(range(1, NUM_SAMPLES + 1))


def test_what_cannot_be_pickled_is_named(data: Path) -> None:
    lock = threading.Lock()

    def guarded(sample: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return sample

    with pytest.raises(InvalidRequest, match=r"guarded\): it captures 'lock'.* cannot be pickled"):
        load(data, guarded)


def test_what_is_no_result_is_told(data: Path) -> None:
    with pytest.raises(GyreError, match="returned list, not a dict of arrays"):
        load(data, lambda sample: [1])
    with pytest.raises(GyreError, match=r"KeyError: 'words' .*; the sample has text"):
        load(data, lambda sample: {"length": len(sample["words"])})
    with pytest.raises(GyreError, match="the field 'text' is str, not an array of numbers"):
        load(data, lambda sample: {"text": "words"})


def test_an_empty_first_sample_needs_a_declared_length(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("\nab\n")
    whole: Any = {"name": lambda sample: sample, "max_length": {"text": 3}}
    (batch,) = load(tmp_path / "lines.txt", whole, batch_size=2)
    assert batch["text"].tolist() == [[0, 0, 0], [97, 98, 0]]
    with pytest.raises(
        InvalidRequest, match=r"'text' is \[0\] for .* 'max_length': \{'text': N\}\}"
    ):
        load(tmp_path / "lines.txt", lambda sample: sample)
    wide: Any = {
        "name": lambda sample: {"x": np.zeros((2, len(sample["text"])))},
        "max_length": {"x": 3},
    }
    with pytest.raises(InvalidRequest, match=r"'x' is \[2, 0\] for .* at least one element"):
        load(tmp_path / "lines.txt", wide)


def test_a_shared_daemon_runs_none(data: Path, gyred: StartDaemon) -> None:
    daemon = gyred({"datasets": {"lines": {"uri": str(data)}}})
    with pytest.raises(InvalidRequest, match="a shared daemon runs no functions"):
        Loader("lines", batch_size=4, address=daemon.address, transform=[count])
    declared = {"name": "python", "title": "f", "function": "", "payload": "/x"}
    with pytest.raises(GyreError, match="runs no functions of scripts"):
        Loader("lines", batch_size=4, address=daemon.address, transform=[declared])


SCRIPT = """
import helper
from gyre_client import Loader

FACTOR = 2

def scale(sample):
    return {"x": helper.length(sample["text"]) * FACTOR}

if __name__ == "__main__":
    with Loader(%r, batch_size=4, order="sequential", transform=[scale]) as loader:
        print([x for batch in loader for x in batch["x"].tolist()])
"""


def test_a_function_of_a_script_uses_modules_next_to_it(data: Path, tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program/helper.py").write_text("def length(text):\n    return len(text)\n")
    (tmp_path / "program/train.py").write_text(SCRIPT % str(data))
    result = subprocess.run(
        [sys.executable, "program/train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.stdout == f"{[2 * n for n in range(1, NUM_SAMPLES + 1)]}\n", result.stderr


def doubled(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": function(sample)["x"] * 2}

    return wrapper


def tripled(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": function(sample)["x"] * 3}

    return wrapper


def test_functions_of_one_line_and_those_that_wrap_one_function_are_told_apart(data: Path) -> None:
    """Their names, and the lines that Python has for them, are the same."""
    arguments: dict[str, Any] = {"batch_size": 4, "order": "sequential"}
    length = {"name": "crop_or_pad", "field": "text", "length": 2}
    one, ten = lambda s: {"x": s["text"] + 1}, lambda s: {"x": s["x"] * 10}  # fmt: skip
    assert load(data, length, one, ten)[0]["x"][1].tolist() == [1210 % 256] * 2
    with (
        Loader(data, transform=[doubled(size)], **arguments) as twice,
        Loader(data, transform=[tripled(size)], **arguments) as thrice,
    ):
        assert next(twice)["x"].tolist() == [2, 4, 6, 8]
        assert next(thrice)["x"].tolist() == [3, 6, 9, 12]


def size(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": len(sample["text"])}


NOTEBOOK = r"""
import importlib, os, sys
from pathlib import Path
from gyre_client import Loader

sys.path.insert(0, os.getcwd())

def cell(factor):
    for name in ("inner.py", "augment.py"):  # a module, and one that it imports
        Path(name).write_text(SOURCES[name] % factor)
        os.utime(name, (factor, factor))
    for name in ("inner", "augment"):
        importlib.reload(importlib.import_module(name))

SOURCES = {
    "inner.py": "FACTOR = %d\n",
    "augment.py": "import inner\ndef scale(s): return {'x': len(s['text']) * inner.FACTOR}  # %d\n",
}
loaders = []
for factor in (1, 100, 1000):
    cell(factor)
    import augment
    for transform in (augment.scale, lambda s: augment.scale(s)):
        loaders.append(Loader(sys.argv[1], batch_size=4, order="sequential", transform=[transform]))
        print(next(loaders[-1])["x"].tolist())
"""


def test_a_module_that_is_edited_and_reloaded_is_imported_again(data: Path, tmp_path: Path) -> None:
    """As in a notebook, where the Loaders of earlier cells are still open."""
    result = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(data)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    wanted = [[n * factor for n in range(1, 5)] for factor in (1, 1, 100, 100, 1000, 1000)]
    assert result.stdout.splitlines() == [str(each) for each in wanted], result.stderr


EDITED = r"""
import os, sys
from pathlib import Path
from gyre_client import Loader

sys.path.insert(0, os.getcwd())
SOURCE = '''
import os
from pathlib import Path
def scale(sample):
    if Path("%s").exists():
        Path("%s").unlink()
        os._exit(1)
    return {"x": %d}
'''
flag = Path("flag").absolute()
Path("augment.py").write_text(SOURCE % (flag, flag, 1))
import augment
loader = Loader(sys.argv[1], batch_size=4, transform=[augment.scale]).stream()
next(loader)
Path("augment.py").write_text(SOURCE % (flag, flag, 1000))
flag.touch()
for _ in range(10_000):
    assert next(loader)["x"].tolist() == [1] * 4, "another worker runs other code"
"""


def test_a_new_worker_does_not_run_a_module_that_was_edited(data: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", EDITED, str(data)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert "augment.py was edited while the job runs" in result.stderr.splitlines()[-1]


def test_two_threads_may_write_one_function_at_once(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def third(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": 3 * len(sample["text"])}

    barrier, dump = threading.Barrier(2), pickle.dump

    def dump_together(*arguments: Any) -> None:
        barrier.wait(60)  # both files are open now
        dump(*arguments)

    monkeypatch.setattr(pickle, "dump", dump_together)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: load(data, third), range(2))
    assert column(first, "x") == column(second, "x") == [3 * n for n in range(1, NUM_SAMPLES + 1)]
