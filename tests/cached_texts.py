"""Texts of many lengths, tokenised by daemons with and without a cache: what is made how often."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from gyre_client import Loader
from tokenizers import Tokenizer

from tests.batches import Batch
from tests.conftest import Daemon, to_toml
from tests.daemons import status
from tests.preloaded.interpreter import Interpreter

NUM, PER_SHARD, LENGTH, END = 300, 75, 96, 1
WORDS = ("cat", "the mat", "hello world", "ä", "no", "answer is")
PACK = {"field": "tokens", "length": LENGTH, "overlong": "split"}
CACHE = {"name": "cache"}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Chain = Sequence[Mapping[str, Any]]


def texts() -> list[str]:
    """Texts of many lengths, in all about ten blocks of the cache; some are empty."""
    generator = np.random.default_rng(4)
    counts = np.minimum(generator.lognormal(4.6, 0.9, NUM).astype(int), 900)
    counts[[5, 6, NUM - 1]] = 0
    return [" ".join(generator.choice(WORDS, count)) for count in counts]


def write(folder: Path) -> dict[str, dict[str, Any]]:
    """Writes the texts in two formats, with a number and a talk; returns their tables."""
    rows = [
        {
            "text": text,
            "number": number,
            "score": number / 8,
            "talk": json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"number {number}"},
                        {"role": "assistant", "content": text[:400]},
                    ]
                }
            ),
        }
        for number, text in enumerate(texts())
    ]
    for name in ("lines", "columns"):
        (folder / name).mkdir()
    for shard in range(NUM // PER_SHARD):
        some = rows[shard * PER_SHARD : (shard + 1) * PER_SHARD]
        lines = "".join(json.dumps({"text": row["text"]}) + "\n" for row in some)
        (folder / f"lines/{shard}.jsonl").write_text(lines)
        path = folder / f"columns/{shard}.parquet"
        pq.write_table(pa.Table.from_pylist(some), path, row_group_size=20)
    return {name: {"uri": str(folder / name)} for name in ("lines", "columns")}


def tables(data: Path) -> dict[str, dict[str, Any]]:
    return {name: {"uri": str(data / name)} for name in ("lines", "columns")}


class Served(NamedTuple):
    """A daemon, and its configuration, which alone may name the file of a tokenizer."""

    daemon: Daemon
    config: dict[str, Any]

    def name_of(self, source: str, chain: Chain) -> str:
        """The name of a dataset with this chain, which is added where it is new."""
        datasets = self.config["datasets"]
        name = f"{source}-{hashlib.sha256(json.dumps(chain).encode()).hexdigest()[:12]}"
        if name not in datasets:
            datasets[name] = datasets[source] | {"transforms": list(chain)}
            event = self.daemon.reconfigure(to_toml(self.config))
            assert event["event"] == "reloaded", event
        return name


def start(folder: Path, config: Mapping[str, Any], interpreter: Interpreter) -> Served:
    """Starts a daemon with a folder of its own."""
    folder.mkdir()
    address = f"unix:{folder}/run/gyre.sock"
    values = {
        "listen": [address],
        "index_dir": str(folder / "index"),
        "drain_timeout_s": 3.0,
        "num_transform_workers": 2,
        **config,
    }
    (folder / "gyre.toml").write_text(to_toml(values))
    daemon = Daemon(folder / "gyre.toml", address, folder / "log", {}, interpreter=interpreter)
    return Served(daemon.start(), values)


def tokenize(data: Path, field: str = "json", **options: Any) -> dict[str, Any]:
    path = str(data / "tokenizer.json")
    key = {"key": "text"} if field == "json" else {}
    return {"name": "tokenize", "field": field, "tokenizer": path, "end": END, **key, **options}


def loader(served: Served, dataset: str, transform: Chain | None, **options: Any) -> Loader:
    name = dataset if transform is None else served.name_of(dataset, transform)
    return Loader(name, address=served.daemon.address, **{"batch_size": 6, "seed": 3, **options})


def num_transformed(served: Served) -> int:
    return status(served.daemon).num_samples_transformed


def epoch(
    served: Served, dataset: str, transform: Chain | None, **options: Any
) -> tuple[list[Batch], int]:
    """The batches of an epoch, and how many samples were transformed for it."""
    before = num_transformed(served)
    with loader(served, dataset, transform, epochs=1, **options) as source:
        batches = [{name: each.clone() for name, each in batch.items()} for batch in source]
    return batches, num_transformed(served) - before


def ids_of(data: Path, text: str) -> list[int]:
    library = Tokenizer.from_file(str(data / "tokenizer.json"))
    return [*library.encode(text).ids, END]


Serve = Callable[[Mapping[str, Any]], Served]
