"""`rename` and `cast`: other names and dtypes of fields, alike in every format."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gyre_client import Loader
from gyre_client.errors import ConfigError, CorruptSample, GyreError

from benchmarks.loader.mosaic import streaming

pytestmark = pytest.mark.usefixtures("private_daemon")

NUMBERS = [0, 1, 127, -128, 5]
SCORES = [0.5, -1.25, 3.0, 1e9, 2.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chosen")
    rows = list(zip(NUMBERS, SCORES, strict=True))
    (folder / "csv").mkdir()
    lines = [f"{number},{score}" for number, score in rows]
    (folder / "csv/a.csv").write_text("\n".join(["number,score", *lines]) + "\n")
    columns = {"number": "int", "score": "float64", "pair": "ndarray:int16:2"}
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for number, score in rows:
            pair = np.array([number, 1], np.int16)
            writer.write({"number": number, "score": score, "pair": pair})
    (folder / "parquet").mkdir()
    table = pa.table(
        {
            "number": pa.array([None, *NUMBERS[1:]], pa.int64()),
            "score": SCORES,
            "pair": pa.array([[number, 1] for number in NUMBERS], pa.list_(pa.int16(), 2)),
            "digits": [str(number) for number in NUMBERS],
            "raw": [b"12"] * 5,
        }
    )
    pq.write_table(table, folder / "parquet/a.parquet")
    return folder


def batch(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    with Loader(path, batch_size=5, order="sequential", options=options) as loader:
        return dict(next(iter(loader)))


@pytest.mark.parametrize("kind", ["csv", "mds", "parquet"])
def test_fields_have_the_names_and_dtypes_that_were_asked_for(kind: str, folder: Path) -> None:
    found = batch(
        folder / kind, rename={"number": "label"}, cast={"label": "int8", "score": "float32"}
    )
    assert "number" not in found
    assert found["label"].dtype == torch.int8
    assert found["label"].tolist() == NUMBERS
    assert found["score"].dtype == torch.float32
    assert found["score"].tolist() == SCORES
    if kind == "parquet":
        assert found["label.present"].tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_columns_under_one_name_are_different_data(tmp_path: Path, compression: str | None) -> None:
    """The node cache keeps both."""
    columns = {"coarse": "int", "fine": "int"}
    with streaming.MDSWriter(
        out=str(tmp_path / "set"), columns=columns, compression=compression
    ) as writer:
        for number in range(5):
            writer.write({"coarse": number // 2, "fine": number})
    fingerprints = set()
    for column, wanted in (("coarse", [0, 0, 1, 1, 2]), ("fine", [0, 1, 2, 3, 4])):
        options = {"columns": [f"label={column}"]}
        assert batch(tmp_path / "set", **options)["label"].tolist() == wanted
        with Loader(tmp_path / "set", batch_size=5, options=options) as loader:
            fingerprints.add(loader.fingerprint)
    assert len(fingerprints) == 2


def test_arrays_and_digits_are_cast_too(folder: Path) -> None:
    cast = {"pair": "float64", "digits": "int32"}
    found = batch(folder / "parquet", cast=cast, columns=["pair", "digits"])
    assert found["pair"].tolist() == [[float(number), 1.0] for number in NUMBERS]
    assert found["digits"].dtype == torch.int32
    assert found["digits"].tolist() == NUMBERS


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"cast": {"number": "uint8"}}, CorruptSample, "-128 does not fit into uint8"),
        ({"cast": {"score": "int64"}}, CorruptSample, "0.5 does not fit into int64"),
        ({"cast": {"score": "float16"}}, CorruptSample, "does not fit into float16"),
        ({"cast": {"number": "int7"}}, ConfigError, "must be one of int8, int16"),
        ({"cast": {"other": "int8"}}, ConfigError, "no such field"),
        ({"cast": {"raw": "int8"}}, ConfigError, "only numbers, arrays, lists of numbers, and"),
        ({"rename": {"x": "y"}}, ConfigError, "no such field; there are number"),
        ({"rename": {"number": "score"}}, ConfigError, "it is taken"),
        ({"rename": {"number": "sample_id"}}, ConfigError, "it is taken"),
        ({"rename": ["number"]}, ConfigError, "rename"),
        ({"cast": {"number": 8}}, ConfigError, "cast"),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any], kind: type[GyreError], sentence: str, folder: Path
) -> None:
    with pytest.raises(kind, match=sentence):
        batch(folder / "parquet", **options)


def test_numbers_of_text_are_finite_or_not(tmp_path: Path) -> None:
    values = [1.5, np.nan, np.inf, -np.inf]
    np.savetxt(tmp_path / "a.csv", values, header="x", comments="")
    with (tmp_path / "a.csv").open("a") as file:
        file.write("-Infinity\n+INF\n -nan\n-1.5E-2\n")
    wanted = [*values, -np.inf, np.inf, np.nan, -0.015]
    for options, dtype in (("types", "float64"), ("cast", "float16")):
        with Loader(tmp_path / "a.csv", batch_size=8, options={options: {"x": dtype}}) as loader:
            (it,) = loader
            found = it["x"][it["sample_id"].argsort()].to(torch.float64)
        torch.testing.assert_close(
            found, torch.tensor(wanted, dtype=torch.float64), equal_nan=True, rtol=1e-3, atol=0
        )


@pytest.mark.parametrize(
    ("cell", "options", "sentence"),
    [
        ("1e999", {"types": {"x": "float64"}}, "b'1e999' does not fit into float64"),
        ("infinite", {"types": {"x": "float64"}}, "b'infinite' is no decimal number"),
        ("", {"cast": {"x": "int32"}}, "its text is empty, which is no number. In CSV, `types`"),
        ("1" * 65, {"types": {"x": "int64"}}, "its 65 characters are no number; one has at most"),
        ("inf", {"cast": {"x": "int64"}}, "b'inf' is no decimal number"),
    ],
)
def test_text_that_is_no_number_is_told(
    cell: str, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(f"y,x\n0,{cell}\n")
    with pytest.raises(CorruptSample, match=sentence):
        batch(tmp_path / "a.csv", **options)


def test_a_cursor_does_not_fit_other_dtypes(folder: Path) -> None:
    with Loader(folder / "csv", batch_size=5, options={"cast": {"score": "float32"}}) as loader:
        one = loader.fingerprint
    with Loader(folder / "csv", batch_size=5, options={"cast": {"score": "float64"}}) as loader:
        other = loader.fingerprint
    with Loader(folder / "csv", batch_size=5) as loader:
        assert len({one, other, loader.fingerprint}) == 3
