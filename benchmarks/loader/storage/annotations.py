"""How long a daemon keeps others waiting while it opens a dataset with large annotations.

`python -m benchmarks.loader.storage.annotations [--images 118287] [--objects 860000]`

A job reads small batches of tokens, with a pause of 1 ms after each, and another client asks for
the status every 10 ms. Meanwhile a client opens images with annotations: one JSON file of COCO, or
a file of labels for each image, as YOLO has them. The images are empty files.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from gyre_client import Loader
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection

from benchmarks.loader.markdown import table
from benchmarks.loader.processes import daemon, load_average

QUIET_S, NUM_BATCHES = 10.0, 400_000  # of an epoch, more than are read
HEADER = ("meanwhile", "s", "batches", "longest, ms", "99 %", "statuses", "longest, ms", "99 %")


def write_coco(folder: Path, num_images: int, num_objects: int) -> int:
    """As instances_train2017.json is, with polygons; returns its bytes."""
    (folder / "images").mkdir(parents=True)
    rng = np.random.default_rng(0)
    polygon = ",".join(f"{each:.2f}" for each in rng.uniform(10, 600, 60).tolist())
    images = []
    for number in range(num_images):
        (folder / f"images/{number:012}.jpg").touch()
        about = {"id": number, "file_name": f"{number:012}.jpg", "width": 640, "height": 480}
        images.append(json.dumps(about))
    boxes = rng.uniform(1, 200, (num_objects, 4)).round(2).tolist()
    with (folder / "a.json").open("w") as file:
        file.write(f'{{"images":[{",".join(images)}],"categories":[')
        file.write(",".join(f'{{"id":{n},"name":"class {n}"}}' for n in range(1, 91)))
        file.write('],"annotations":[')
        for number, box in enumerate(boxes):
            file.write(
                f'{"," * bool(number)}{{"id":{number},"image_id":{number * 7 % num_images},'
                f'"category_id":{number % 90 + 1},"bbox":{json.dumps(box)},"area":702.1057,'
                f'"iscrowd":0,"segmentation":[[{polygon}]]}}'
            )
        file.write("]}")
    return (folder / "a.json").stat().st_size


def write_yolo(folder: Path, num_images: int, num_objects: int) -> int:
    """The same numbers of images and objects; returns the bytes of all labels."""
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True)
    (folder / "data.yaml").write_text("train: images\nnc: 90\n")
    text = "".join(f"{n} 0.512345 0.498765 0.123456 0.234567\n" for n in range(90))
    lines, total = text.splitlines(keepends=True), 0
    for number in range(num_images):
        (folder / f"images/{number:012}.jpg").touch()
        count = round(2 * num_objects / num_images * (number % 90) / 89)
        its = "".join(lines[:count])
        (folder / f"labels/{number:012}.txt").write_text(its)
        total += len(its)
    return total


@contextmanager
def asked(address: str) -> Iterator[tuple[list[float], list[float]]]:
    """How long each batch and each status takes, in ms, until the block ends."""
    over, batches, statuses = threading.Event(), list[float](), list[float]()

    def read() -> None:
        with Loader("tokens", batch_size=16, address=address, prefetch_batches=2) as loader:
            while not over.wait(1e-3):
                begin = time.perf_counter()
                next(loader)
                batches.append((time.perf_counter() - begin) * 1e3)

    def ask() -> None:
        with Connection(parse_address(address)) as connection:
            while not over.wait(1e-2):
                begin = time.perf_counter()
                connection.status()
                statuses.append((time.perf_counter() - begin) * 1e3)

    with ThreadPoolExecutor(2) as threads:
        working = [threads.submit(read), threads.submit(ask)]
        try:
            yield batches, statuses
        finally:
            over.set()
        for each in working:
            each.result()


def row(what: str, seconds: float, batches: list[float], statuses: list[float]) -> list[str]:
    cells = [what, f"{seconds:.1f}"]
    for each in (batches, statuses):
        longest, late = max(each), statistics.quantiles(each, n=100)[98]
        cells += [f"{len(each):,}", f"{longest:.1f}", f"{late:.1f}"]
    return cells


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=118_287)
    parser.add_argument("--objects", type=int, default=860_000)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.zeros(NUM_BATCHES * 16 * 9, np.uint16).tofile(folder / "tokens.bin")
        bytes_of = {
            "coco": write_coco(folder / "coco", arguments.images, arguments.objects),
            "yolo": write_yolo(folder / "yolo", arguments.images, arguments.objects),
        }
        tokens: dict[str, object] = {"uri": f"{folder}/tokens.bin", "format": "tokens"}
        datasets: dict[str, dict[str, object]] = {
            "tokens": {**tokens, "dtype": "uint16", "sequence_length": 9},
            "coco": {
                "uri": f"{folder}/coco",
                "format": "coco",
                "annotations": "a.json",
                "images": "images",
            },
            "yolo": {"uri": f"{folder}/yolo", "format": "yolo"},
        }
        with daemon(folder, datasets) as serving:
            with asked(serving.address) as times:
                time.sleep(QUIET_S)
            rows.append(row("nothing", QUIET_S, *times))
            for kind, num_bytes in bytes_of.items():
                with asked(serving.address) as times:
                    begin = time.perf_counter()
                    with Loader(kind, batch_size=64, address=serving.address):
                        seconds = time.perf_counter() - begin
                rows.append(row(f"{kind}, {num_bytes / 1e6:.0f} MB", seconds, *times))
    print(f"load average {load_average():.1f}\n")
    print("\n".join(table(HEADER, rows)))


if __name__ == "__main__":
    main()
