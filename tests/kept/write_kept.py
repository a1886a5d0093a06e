"""Writes the data of this folder: cursors, a client and a checkpoint of 29 November 2026.

    python -m tests.kept.write_kept

What it wrote stays: later versions of Gyre read it. Run it for new cases only, at the version that
they should keep, and do not replace older ones.

* `data/`: datasets of a few kilobytes; `cursors.json`: their definitions, and cursors of jobs on
  them with the batches that come next.
* `gyre_client-*.whl`: the client and what it shares with the daemon.
* `run.tar.xz`: a run of `gyre-train` with a checkpoint of two ranks; `history.jsonl`: its steps,
  those after the checkpoint too.
"""

import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
from gyre_client import Loader
from gyre_client.command.cli import main as gyre
from PIL import Image

from benchmarks.loader.mosaic import streaming
from tests.conftest import Daemon, to_toml
from tests.kept.read_kept import Case, read
from tests.train_jobs import tiny_run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NUM_STEPS = 4  # of each case, after its cursor
ONE: list[dict[str, Any]] = [{"rank": 0, "world_size": 1}]
TWO: list[dict[str, Any]] = [{"rank": rank, "world_size": 2} for rank in range(2)]
THREE: list[dict[str, Any]] = [{"rank": rank, "world_size": 3} for rank in range(3)]
SLICES: list[dict[str, Any]] = [
    {"rank": rank, "world_size": 2, "peer": peer, "cp_rank": peer, "cp_size": 2, "cp_cut": "zigzag"}
    for rank in range(2)
    for peer in range(2)
]
PACK = {"field": "ids", "length": 32, "overlong": "split"}
CROPS = [
    {"name": "decode_image", "field": "file"},
    {"name": "random_crop", "size": [6, 6]},
    {"name": "horizontal_flip"},
    {"name": "to_chw"},
]


def boxes(written_as: str, *, normalized: bool) -> list[dict[str, Any]]:
    """Transforms of images with boxes."""
    return [
        {"name": "decode_image", "field": "file"},
        {
            "name": "decode_boxes",
            "field": "objects",
            "key": "bbox",
            "format": written_as,
            "normalized": normalized,
            "fields": {"labels": "label"},
        },
        {"name": "drop", "field": "objects"},
        {"name": "random_crop", "size": [6, 6], "boxes": ["boxes"]},
        {"name": "horizontal_flip", "boxes": ["boxes"]},
        {"name": "sanitize_boxes", "fields": ["labels"]},
    ]


LATER = {"step": 9, "weights": {"web": 0.25, "code": 0.75}}
DATASETS: dict[str, Any] = {
    "tokens": {"uri": "tokens", "format": "tokens", "dtype": "uint16", "sequence_length": 8},
    "grown": {"uri": "grown", "format": "npy", "append": True},
    "tar": {"uri": "tar", "format": "webdataset"},
    "mds": {"uri": "mds", "format": "mds"},
    "lines": {"uri": "lines", "format": "jsonl"},
    "documents": {"uri": "documents", "format": "arrow"},
    "web": {"uri": "web", "format": "parquet"},
    "long": {"uri": "web", "format": "parquet", "filter": "length(text) >= 12"},
    "code": {"uri": "code", "format": "arrow"},
    "photos": {"uri": "photos", "format": "files", "transforms": CROPS},
    "coco": {
        "uri": "boxes",
        "format": "coco",
        "annotations": "coco.json",
        "images": "images/train",
        "transforms": boxes("xywh", normalized=False),
    },
    "yolo": {"uri": "boxes", "format": "yolo", "transforms": boxes("cxcywh", normalized=True)},
}
WEIGHTS = {"web": 0.6, "code": 0.4}
MIXTURES: dict[str, Any] = {
    "mixed": {"weights": WEIGHTS, "block": 10, "schedule": [LATER]},
    "given": {"weights": WEIGHTS, "block": 10},
    "packed": {"weights": WEIGHTS, "block": 10, "pack": PACK | {"field": "text"}},
}


def case(
    dataset: str,
    arguments: dict[str, Any],
    steps: int,
    readers: list[dict[str, Any]],
    then: list[dict[str, Any]],
) -> tuple[int, list[dict[str, Any]], Case]:
    """A job that reads some steps, and who reads on."""
    arguments = {"batch_size": 12, "seed": 7} | arguments
    return steps, readers, {"dataset": dataset, "arguments": arguments, "readers": then}


def cases() -> dict[str, tuple[int, list[dict[str, Any]], Case]]:
    """All cases, by name."""
    balance = {"linear": 30, "quadratic": 1}
    return {
        "plain": case("tokens", {}, 3, ONE, ONE),
        "ranks": case("tokens", {"tail": "pad"}, 3, TWO, THREE),
        "epochs": case("tokens", {"tail": "drop"}, 23, ONE, TWO),
        "sequential": case("lines", {"order": "sequential"}, 2, ONE, ONE),
        "block": case("web", {"order": "block", "window_blocks": 2}, 3, ONE, ONE),
        "skipped": case("tokens", {"skip_steps": [[2, 5], [8, 9]]}, 3, ONE, TWO),
        "peers": case("tokens", {}, 3, TWO, SLICES),
        "tar": case("tar", {}, 3, ONE, ONE),
        "mds": case("mds", {}, 3, ONE, ONE),
        "filter": case("long", {}, 3, ONE, ONE),
        "arrow": case("code", {}, 3, ONE, ONE),
        "grown": case("grown", {}, 3, ONE, TWO),
        "bucket": case("web", {"tail": "drop", "bucket": {"field": "text"}}, 3, ONE, TWO),
        "packed": case("documents", {"pack": PACK}, 3, TWO, THREE),
        "balanced": case("documents", {"pack": PACK, "balance": balance}, 3, TWO, TWO),
        "mixture": case("mixed", {}, 7, TWO, THREE),
        "packed mixture": case("packed", {}, 3, ONE, TWO),
        "given weights": case("given", {"job": "given"}, 3, ONE, TWO),
        "crops": case("photos", {}, 3, TWO, THREE),
        "coco": case("coco", {"batch_size": 4}, 3, ONE, TWO),
        "yolo": case("yolo", {"batch_size": 4}, 3, ONE, TWO),
        "joined": case("tokens", {"join": "rotate"}, 3, ONE, ONE),
    }


def write_data(data: Path) -> None:
    """Write the datasets; `grown` has one shard."""
    rng = np.random.default_rng(1)
    names = ("tokens", "grown", "tar", "lines", "documents", "web", "code", "photos/a", "photos/b")
    for name in (*names, "boxes/images/train", "boxes/labels/train"):
        (data / name).mkdir(parents=True)
    for number, size in enumerate((800, 504)):
        rng.integers(0, 60000, size, np.uint16).tofile(data / f"tokens/{number}.bin")
    np.save(data / "grown/0.npy", np.arange(50, dtype=np.int32).reshape(25, 2))
    with tarfile.open(data / "tar/0.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(30):
            info = tarfile.TarInfo(f"{number:03}.txt")
            text = b"x" * int(rng.integers(1, 30))
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    with streaming.MDSWriter(out=str(data / "mds"), columns={"x": "int"}, size_limit=400) as mds:
        for number in range(40):
            mds.write({"x": number})
    lines = [json.dumps({"text": "z" * int(each)}) for each in rng.integers(1, 20, 60)]
    (data / "lines/0.jsonl").write_text("".join(f"{line}\n" for line in lines))
    documents = [rng.integers(1, 999, each).tolist() for each in rng.integers(2, 40, 60)]
    table = pa.table({"ids": pa.array(documents, pa.list_(pa.int32()))})
    feather.write_feather(table, str(data / "documents/0.arrow"), compression="uncompressed")
    for name, first, num in (("web", 0, 60), ("code", 1000, 45)):
        ids = list(range(first, first + num))
        texts = ["y" * int(each) for each in rng.integers(1, 40, num)]
        table = pa.table({"id": ids, "text": texts})
        if name == "web":
            pq.write_table(table, data / "web/0.parquet", row_group_size=7)
        else:
            feather.write_feather(table, str(data / "code/0.arrow"), compression="uncompressed")
    for number in range(24):
        folder = data / ("photos/a" if number % 2 else "photos/b")
        picture(rng).save(folder / f"{number:02}.png")
    write_boxes(data / "boxes", rng)


def picture(rng: np.random.Generator) -> Image.Image:
    """Eight by eight pixels."""
    return Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))


def write_boxes(folder: Path, rng: np.random.Generator) -> None:
    """Write images with boxes, as COCO and YOLO have them."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(18):
        name = f"{number:03}.png"
        picture(rng).save(folder / "images/train" / name)
        images.append({"id": number, "file_name": name, "height": 8, "width": 8})
        boxes = rng.integers(1, 4, (number % 3, 4)).tolist()
        labels = []
        for x, y, width, height in boxes:
            annotations.append(
                {
                    "id": len(annotations),
                    "image_id": number,
                    "category_id": 1 + number % 2,
                    "bbox": [x, y, width, height],
                    "iscrowd": 0,
                }
            )
            center = [(x + width / 2) / 8, (y + height / 2) / 8, width / 8, height / 8]
            labels.append(f"{number % 2} {' '.join(map(str, center))}\n")
        (folder / "labels/train" / f"{number:03}.txt").write_text("".join(labels))
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "coco.json").write_text(json.dumps(document))
    (folder / "data.yaml").write_text("train: images/train\nnames: [cat, dog]\n")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Daemon]:
    """A daemon for the datasets in `data/`."""
    address = f"unix:{folder}/run/gyre.sock"
    datasets = {
        name: {**its, "uri": str(HERE / "data" / its["uri"])} for name, its in DATASETS.items()
    }
    config: dict[str, Any] = {"listen": [address], "index_dir": str(folder / "index")}
    (folder / "gyre.toml").write_text(
        to_toml({**config, "datasets": datasets, "mixtures": MIXTURES})
    )
    daemon = Daemon(folder / "gyre.toml", address, folder / "log", {}).start()
    try:
        yield daemon
    finally:
        daemon.stop()


def write_cursors() -> None:
    """Write `cursors.json`."""
    states = {}
    with TemporaryDirectory() as folder, serving(Path(folder)) as daemon:
        for name, (steps, readers, its) in cases().items():
            before = its | {"readers": readers}
            if name == "given weights":
                states[name] = state_of_given(daemon, before, steps)
            elif name == "joined":
                states[name] = state_of_joined(daemon, before, steps)
            else:
                _, states[name] = read(daemon.address, before, steps)
    shard = np.arange(50, 90, dtype=np.int32).reshape(20, 2)
    np.save(HERE / "data/grown/1.npy", shard)
    written = {}
    with TemporaryDirectory() as folder, serving(Path(folder)) as daemon:
        for name, (_, _, its) in cases().items():
            its["state"] = states[name]
            batches, _ = read(daemon.address, its, NUM_STEPS)
            written[name] = its | {"batches": batches}
    everything = {"datasets": DATASETS, "mixtures": MIXTURES, "cases": written}
    (HERE / "cursors.json").write_text(json.dumps(everything, indent=1) + "\n")


def state_of_given(daemon: Daemon, case: Case, steps: int) -> str:
    """The state of a job that was given other weights from step 5 on while it ran."""
    arguments = case["arguments"] | {"prefetch_batches": 1}
    with Loader(case["dataset"], address=daemon.address, **arguments, **ONE[0]) as loader:
        next(loader)
        change = ["mix", case["dataset"], "--weights", "web=0.2,code=0.8", "--from-step", "5"]
        assert gyre([*change, "--address", daemon.address]) == 0
        for _ in range(steps - 1):
            next(loader)
        return base64.b64encode(loader.state_dict()["cursor"]).decode()


def state_of_joined(daemon: Daemon, case: Case, steps: int) -> str:
    """The state of a job that began where another one read."""
    arguments = case["arguments"] | {"join": "alone"}
    with Loader(case["dataset"], address=daemon.address, **arguments, **ONE[0]) as first:
        for _ in range(5):
            next(first)
        return read(daemon.address, case, steps)[1]


def write_client() -> None:
    """Write the wheel of the client: pure Python, so its files and their names are all of it."""
    its_version = version("gyre-ml")
    path = HERE / f"gyre_client-{its_version}-py3-none-any.whl"
    tracked = subprocess.run(
        ["git", "ls-files", "client/gyre_client", "protos/gyre_protos", "common/gyre_common"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.splitlines()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name in tracked:
            if name.endswith((".py", "py.typed")):
                wheel.writestr(
                    zipfile.ZipInfo(name.partition("/")[2]),
                    (ROOT / name).read_bytes(),
                    zipfile.ZIP_DEFLATED,
                    9,
                )
        info = f"gyre_client-{its_version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: gyre_client\nVersion: {its_version}\n"
        wheel.writestr(zipfile.ZipInfo(f"{info}/METADATA"), metadata)
        tags = "Wheel-Version: 1.0\nGenerator: gyre\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(zipfile.ZipInfo(f"{info}/WHEEL"), tags)


def write_run() -> None:
    """Write a checkpoint of two ranks, and the history of the steps before and after it."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (np.arange(900) % 64).astype(np.uint16).tofile(place / "tokens.bin")
        for steps, flags in ((2, []), (4, ["--resume"])):
            run = {"steps": steps, "log_every": 1}
            data = {"dataset": "tokens.bin"}
            config = tiny_run(place, run=run, data=data, checkpoint={"every": 2})
            (place / "train.toml").write_text(config)
            command = [sys.executable, "-m", "gyre_trainer", "run", "train.toml", "--nproc=2"]
            subprocess.run([*command, *flags], check=True, timeout=300, cwd=place)
            if steps == 2:
                with tarfile.open(HERE / "run.tar.xz", "w:xz") as tar:
                    tar.add(place / "run/checkpoints", "run/checkpoints", filter=_nameless)
                    tar.add(place / "run/history.jsonl", "run/history.jsonl", filter=_nameless)
        (HERE / "history.jsonl").write_text((place / "run/history.jsonl").read_text())


def _nameless(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """A file without its owner and its time."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def main() -> None:
    """Write everything that is not there."""
    os.chdir(ROOT)
    if not (HERE / "data").exists():
        write_data(HERE / "data")
        write_cursors()
    if not list(HERE.glob("*.whl")):
        write_client()
    if not (HERE / "run.tar.xz").exists():
        write_run()


if __name__ == "__main__":
    main()
