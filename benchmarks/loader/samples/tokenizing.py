"""Raw text to token files: `gyre convert` next to `datasets.map` and a pool of processes.

`python -m benchmarks.loader.samples.tokenizing`

All read the same JSON lines and write the same ids, back to back, with two processes that tokenise.
Rounds take turns. The seconds are those of whole commands, with the starts of their processes; the
`datasets` library builds its table anew in each round, as Gyre its index.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.loader.markdown import table
from benchmarks.loader.samples.text import write_texts

NUM_PROCESSES, CHUNK, END = 2, 256, 1


def gyre(folder: Path, target: Path, *more: str) -> None:
    """`gyre convert`."""
    tokenize = ["tokenize", "field=json", "key=text", f"tokenizer={folder}/tokenizer.json"]
    command = [sys.executable, "-m", "gyre_client", "convert", str(folder / "jsonl"), str(target)]
    options = ["--json", "--to", "tokens", "--dtype", "uint16", "--samples-per-shard", "2000"]
    chain = ["--transform", *tokenize, f"end={END}", *more]
    subprocess.run([*command, *options, *chain], check=True, stdout=subprocess.DEVNULL)


def gyre_library(folder: Path, target: Path) -> None:
    """The same with the tokenizer's own library."""
    gyre(folder, target, "engine=library")


_tokenizer: Any = None


def _begin(path: str) -> None:
    global _tokenizer  # noqa: PLW0603
    _tokenizer = Tokenizer.from_file(path)


def _ids(lines: list[str]) -> bytes:
    found = _tokenizer.encode_batch([json.loads(line)["text"] for line in lines])
    return np.concatenate([[*each.ids, END] for each in found]).astype("<u2").tobytes()


def _chunks(path: Path) -> Iterator[list[str]]:
    with path.open() as file:
        while lines := [line for _, line in zip(range(CHUNK), file, strict=False)]:
            yield lines


def pool(folder: Path, target: Path) -> None:
    """A pool of processes, as nanoGPT and others have it."""
    target.mkdir()
    arguments = (str(folder / "tokenizer.json"),)
    with (
        get_context("spawn").Pool(NUM_PROCESSES, _begin, arguments) as processes,
        (target / "all.bin").open("wb") as file,
    ):
        for ids in processes.imap(_ids, _chunks(folder / "jsonl/a.jsonl")):
            file.write(ids)


def mapped(folder: Path, target: Path) -> None:
    """`datasets.map` in batches, then the columns to a file."""
    target.mkdir()
    script = (
        "import sys, numpy as np, datasets\n"
        "from tokenizers import Tokenizer\n"
        "source, tokenizer, target, cache = sys.argv[1:]\n"
        "library = Tokenizer.from_file(tokenizer)\n"
        "def ids(rows):\n"
        f"    return {{'ids': [[*e.ids, {END}] for e in library.encode_batch(rows['text'])]}}\n"
        "rows = datasets.load_dataset('json', data_files=source, split='train', cache_dir=cache)\n"
        f"rows = rows.map(ids, batched=True, num_proc={NUM_PROCESSES}, remove_columns=['text'])\n"
        "with open(target, 'wb') as file:\n"
        "    for batch in rows.with_format('arrow').iter(1000):\n"
        "        file.write(batch['ids'].combine_chunks().flatten().to_numpy().astype('<u2'))\n"
    )
    files = str(folder / "jsonl/a.jsonl"), str(folder / "tokenizer.json"), str(target / "all.bin")
    cache = target.with_suffix(".cache")
    command = [sys.executable, "-c", script, *files, str(cache)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    shutil.rmtree(cache)


CONTENDERS: dict[str, Callable[[Path, Path], None]] = {
    "gyre convert": gyre,
    "gyre convert, engine=library": gyre_library,
    "pool of processes": pool,
    "datasets.map": mapped,
}


def main() -> None:
    """Prints a table of medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("jsonl", "parquet"):
            (folder / name).mkdir()
        write_texts(folder)
        written: dict[str, bytes] = {}
        for number in range(args.rounds):
            for name, run in list(CONTENDERS.items())[:: -1 if number % 2 else 1]:
                target = folder / f"out-{number}-{len(written)}-{len(name)}"
                began_s = time.monotonic()
                run(folder, target)
                seconds[name].append(time.monotonic() - began_s)
                written[name] = b"".join(path.read_bytes() for path in sorted(target.iterdir()))
                shutil.rmtree(target)
        assert len(set(written.values())) == 1, "they wrote different ids"
        num_tokens = len(next(iter(written.values()))) // 2
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    best = min(medians["pool of processes"], medians["datasets.map"])
    rows = [
        [name, f"{each:.1f}", f"{num_tokens / each:,.0f}", f"{best / each:.2f}"]
        for name, each in medians.items()
    ]
    print(f"{num_tokens:,} tokens, {args.rounds} rounds, load average {os.getloadavg()[0]:.1f}")
    print("\n".join(table(["", "s", "tokens/s", "of the better other one's rate"], rows)))


if __name__ == "__main__":
    main()
