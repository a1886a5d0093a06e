"""Sources of a mixture in other formats, each with transforms of its own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import CursorRejected

from tests.batches import Batch, same, take
from tests.conftest import StartDaemon, to_toml
from tests.mixtures import SIZES, text_of, write_sources
from tests.packing import check_packed

TOKENIZE = {"name": "tokenize", "field": "text", "tokenizer": "bytes", "end": 256}
JSON = {"name": "tokenize", "field": "json", "key": "body", "tokenizer": "bytes", "end": 257}


def line_of(number: int) -> str:
    return f"line {number} " * (number % 4)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    sources = write_sources(tmp_path / "data")
    (tmp_path / "lines").mkdir()
    lines = [json.dumps({"body": line_of(number), "n": number}) for number in range(30)]
    (tmp_path / "lines" / "0.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "datasets": {
            "web": sources["web"] | {"transforms": [TOKENIZE]},
            "lines": {"uri": str(tmp_path / "lines"), "transforms": [JSON]},
        },
        "mixtures": {
            "all": {"weights": {"web": 3, "lines": 1}, "block": 16},
            "deeper": {
                "weights": {"all": 1},
                "transforms": [{"name": "crop_or_pad", "field": "tokens", "length": 6}],
            },
        },
    }


def expected(batch: Batch, row: int) -> list[int]:
    number = int(batch["sample_id"][row])
    if not batch["source"][row]:
        return [*text_of(number).encode(), 256]
    return [*line_of(number - SIZES["web"]).encode(), 257]


def test_each_source_is_transformed_by_itself(
    gyred: StartDaemon,
    config: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    daemon = gyred(config)

    def loader(name: str, **keys: Any) -> Loader:
        return Loader(name, batch_size=8, seed=2, address=daemon.address, **keys)

    with loader("all") as alone:
        whole = take(alone, 16)
        state = alone.state_dict()
    for batch in whole:
        assert sorted(batch) == ["sample_id", "source", "tokens", "tokens.offsets"]
        bounds = batch["tokens.offsets"].tolist()
        for row in range(8):
            tokens = batch["tokens"][bounds[row] : bounds[row + 1]].tolist()
            assert tokens == expected(batch, row)
    sources = np.concatenate([batch["source"].numpy() for batch in whole])
    assert sources.reshape(-1, 16).sum(axis=1).tolist() == [4] * 8
    with loader("deeper") as more:  # the mixture's own transforms come behind those of its sources
        for batch in take(more, 4):
            rows = [(expected(batch, row) + [0] * 6)[:6] for row in range(8)]
            assert batch["tokens"].tolist() == rows
        first = more.state_dict()
        (tmp_path / "cursor").write_bytes(first["cursor"])
        batch = next(more)
    flags = ("--address", daemon.address, "--json")
    order = ("--batch-size", "8", "--seed", "2", *flags)
    assert main(["plan", "deeper", "--step", "4", *order]) == 0
    assert json.loads(capsys.readouterr().out)["sample_ids"] == batch["sample_id"].tolist()
    assert main(["plan", "deeper", "--sources", "--step", "0:4", *order]) == 0
    assert json.loads(capsys.readouterr().out)["counts"][-1]["num_samples"] == [32]
    # what is shown of a sample is as it is stored
    rewind = ["rewind", str(tmp_path / "cursor"), "--dataset", "deeper", "--step", "4", *flags]
    assert main(rewind) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    own = [row["samples"][0]["sample_id"] for row in step["rows"]]
    names = [step["sources"][row["samples"][0]["source"]] for row in step["rows"]]
    assert names == [["all/web", "all/lines"][each] for each in batch["source"].tolist()]
    assert own == [
        number - SIZES["web"] * source
        for number, source in zip(
            batch["sample_id"].tolist(), batch["source"].tolist(), strict=True
        )
    ]
    with loader("all", pack={"field": "tokens", "length": 48}) as packed:
        for batch in take(packed, 6):
            last = {int(tokens[-1]) - 256 for _, tokens in check_packed(batch, "tokens", 0)}
            assert last <= set(batch["source"].tolist())
        resumed = packed.state_dict()
        following = take(packed, 3)
    daemon.kill()
    daemon.start()
    with loader("all", pack={"field": "tokens", "length": 48}) as packed:
        packed.load_state_dict(resumed)
        assert same(take(packed, 3), following)
    config["datasets"]["web"]["transforms"] = [{**TOKENIZE, "end": 7}]
    daemon.reconfigure(to_toml({"listen": [daemon.address], **config}))
    with loader("all") as other, pytest.raises(CursorRejected, match="of the source `web`"):
        other.load_state_dict(state)
