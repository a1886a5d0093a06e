"""What a checkpoint says of the data of its run."""

import datetime
import json
from pathlib import Path

import pytest
from gyre_trainer.training.config import DataConfig
from gyre_trainer.training.run_checkpoints import data_of


@pytest.mark.parametrize(
    ("dataset", "data_format", "wanted"),
    [
        ("data/a", "tokens", "{here}/data/a"),
        ("./data", "", "{here}/./data"),
        ("~/data", "", "{home}/data"),
        ("/data/a", "", "/data/a"),
        ("wiki", "", "wiki"),
        ("s3://bucket/a", "", "s3://bucket/a"),
    ],
)
def test_a_path_is_absolute_with_a_format_or_without(
    dataset: str, data_format: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    data = DataConfig(dataset, batch_size=1, sequence_length=1, format=data_format)
    place = wanted.format(here=tmp_path, home=tmp_path / "home")
    assert data_of(data)["dataset"] == (place if "://" in place else str(Path(place)))


def test_options_are_json_without_those_of_the_storage() -> None:
    options = {
        "storage": {"secret_access_key": "x"},
        "stride": 2,
        "since": datetime.date(2024, 1, 2),  # a date of TOML, which the daemon refuses by itself
    }
    data = DataConfig("/data", batch_size=1, sequence_length=1, options=options)
    assert json.loads(data_of(data)["options"]) == {"stride": 2, "since": "2024-01-02"}
