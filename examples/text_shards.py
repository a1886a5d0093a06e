"""Train on text in tar shards.

Written with the webdataset library, read through a private daemon, nothing else set up.

Each docstring of the standard library is a document, so a sample is a few words or several pages.

    python examples/text_shards.py [--workdir .demo]
"""

import argparse
import ast
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import webdataset

TRAIN_CONFIG = Path(__file__).with_name("docstrings.toml")
MIN_CHARACTERS = 80
DOCUMENTS_PER_SHARD = 1000


def main() -> int:
    """Write the shards if they are missing, and train; return the status of `gyre-train`."""
    parser = argparse.ArgumentParser(
        description="Write webdataset shards of text and train on them."
    )
    parser.add_argument("--workdir", type=Path, default=Path(".demo"))
    workdir = parser.parse_args().workdir.resolve()
    shards, run = workdir / "docstrings", workdir / "text-run"
    if not shards.exists():
        write_shards(shards)
    shutil.rmtree(run, ignore_errors=True)
    overrides = [
        f"--set=data.dataset={shards}",
        f"--set=eval.dataset={shards}",
        f"--set=run.out={run}",
    ]
    command = [
        sysconfig.get_path("scripts") + "/gyre-train",
        "run",
        str(TRAIN_CONFIG),
        "--nproc",
        "2",
        *overrides,
    ]
    return subprocess.run(command, check=False).returncode


def write_shards(folder: Path) -> None:
    """Write a folder of tar files, complete or absent.

    Member KEY.txt is a docstring, KEY.json says where it is from.
    """
    unfinished = folder.with_suffix(".writing")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    with webdataset.ShardWriter(
        f"{unfinished}/docstrings-%06d.tar", maxcount=DOCUMENTS_PER_SHARD, verbose=0
    ) as writer:
        for index, (module, text) in enumerate(docstrings()):
            writer.write({"__key__": f"{index:08}", "txt": text, "json": {"module": module}})
    unfinished.rename(folder)


def docstrings() -> Iterator[tuple[str, str]]:
    """Module path and text of each docstring of the standard library that is longer than a line."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # some of the library's tests are wrong on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= MIN_CHARACTERS:
                    yield str(path.relative_to(library)), text


if __name__ == "__main__":
    sys.exit(main())
