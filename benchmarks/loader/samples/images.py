"""JPEG files to random crops of 224 pixels: Gyre beside DataLoader, webdataset and streaming.

`python -m benchmarks.loader.samples.images [--rounds 3] [--only TEXT ...]`

All contenders read the same images, with the page cache hot, or from an object server in a process
of its own whose first byte comes after 20 ms (p50; p99 200 ms), past any cache. They hand out uint8
batches of 64 of [3, 224, 224]. A job is a process of its own, with two workers where it has any;
two jobs of Gyre have one order. Rounds of all contenders are interleaved. Processor time is that of
a job and its workers, or of the jobs, the daemon and its processes, once every job has taken its
first batches.
"""

import argparse
import io
import json
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from gyre_client import Loader
from gyre_media.colors import ToChw
from gyre_media.decode_image import DecodeImage
from gyre_media.geometry import HorizontalFlip, RandomResizedCrop
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.loader.markdown import table
from benchmarks.loader.mosaic import streaming
from benchmarks.loader.processes import cpu_s, daemon, family, load_average
from benchmarks.loader.storage.objects import FIRST_BYTE
from tests.object_server.process import object_server

NUM_IMAGES, NUM_DIFFERENT, NUM_CLASSES, NUM_TARS = 20_000, 2_000, 20, 20
BATCH_SIZE, SIZE = 64, 224
NUM_WORKERS = 2
RUN_S, NUM_FIRST = 5.0, 6
CACHED = "Gyre, folder, cached"
# Images are cached in one size, from which a crop is taken.
# Decoded row groups of Parquet lie in the same cache; with less, they displace images.
CACHED_SIZE, CACHE_BYTES = 256, 6_000_000_000
CONTENDERS = (
    "DataLoader, Pillow",
    "webdataset, Pillow",
    "mosaicml-streaming, Pillow",
    "DataLoader, our transforms",
    "Gyre, folder",
    "Gyre, tars",
    "Gyre, Parquet",
    "DataLoader, our transforms, no antialias",
    "Gyre, folder, no antialias",
    CACHED,
    f"{CACHED}, no antialias",
    "webdataset, object storage",
    "Gyre, object storage",
    "Gyre, object storage, no antialias",
)
IN_PAIRS = ("DataLoader, Pillow", "Gyre, folder")


def jpeg(generator: np.random.Generator) -> bytes:
    """A picture with noise, whose file has 33 to 83 KiB."""
    height, width = generator.integers(300, 400, 2).tolist()
    coarse = generator.integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    strength = int(generator.integers(10, 24))
    noise = generator.normal(0, strength, (height, width, 3))
    buffer = io.BytesIO()
    pixels = (np.asarray(smooth) + noise).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def write(folder: Path) -> list[int]:
    """The images as files, in tars and in Parquet; returns the sizes of the files."""
    generator = np.random.default_rng(0)
    different = [jpeg(generator) for _ in range(NUM_DIFFERENT)]
    images = [different[number % NUM_DIFFERENT] for number in range(NUM_IMAGES)]
    for number, data in enumerate(images):
        path = folder / f"folder/{number % NUM_CLASSES:02}/{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for kind in ("stored/tars", "parquet"):
        (folder / kind).mkdir(parents=True)
    for shard in range(NUM_TARS):
        numbers = range(shard, NUM_IMAGES, NUM_TARS)
        with tarfile.open(folder / f"stored/tars/{shard}.tar", "w") as archive:
            for number in numbers:
                for name, data in (
                    ("jpg", images[number]),
                    ("cls", b"%d" % (number % NUM_CLASSES)),
                ):
                    member = tarfile.TarInfo(f"{number:05}.{name}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        columns = {
            "jpg": pa.array([images[number] for number in numbers], pa.binary()),
            "cls": pa.array([number % NUM_CLASSES for number in numbers], pa.int64()),
        }
        pq.write_table(pa.table(columns), folder / f"parquet/{shard}.parquet", row_group_size=100)
    if streaming:
        kinds = {"jpg": "bytes", "cls": "int"}
        with streaming.MDSWriter(out=str(folder / "mds"), columns=kinds) as writer:
            for number, data in enumerate(images):
                writer.write({"jpg": data, "cls": number % NUM_CLASSES})
    return [len(data) for data in different]


def chain(field: str, *, antialias: bool, is_cached: bool = False) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = [
        {"name": "resize", "size": [CACHED_SIZE, CACHED_SIZE]},
        {"name": "cache"},
    ]
    return [
        {"name": "decode_image", "field": field},
        *(kept if is_cached else []),
        {"name": "random_resized_crop", "size": SIZE, "antialias": antialias},
        {"name": "horizontal_flip"},
        {"name": "to_chw"},
    ]


def with_pillow(data: bytes) -> torch.Tensor:
    """Transform as torchvision does with an image of Pillow, then `PILToTensor`."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    box = RandomResizedCrop(SIZE).box(image.height, image.width, np.random.default_rng())
    top, left, height, width = box
    part = image.crop((left, top, left + width, top + height))
    part = part.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(part)).permute(2, 0, 1).contiguous()


class WithOurs:
    """Our transforms in a worker of a DataLoader."""

    def __init__(self, *, antialias: bool) -> None:
        crop = RandomResizedCrop(SIZE, antialias=antialias)
        self._steps = [DecodeImage("jpg"), crop, HorizontalFlip(), ToChw()]
        self._rng = np.random.default_rng()

    def __call__(self, data: bytes) -> torch.Tensor:
        sample, made = {"jpg": np.frombuffer(data, np.uint8)}, torch.empty(3, SIZE, SIZE).byte()
        for step in self._steps[:-1]:
            step.apply(sample, self._rng, {})
        self._steps[-1].apply(sample, self._rng, {"image": made.numpy()})
        return made


class Files(Dataset[tuple[torch.Tensor, int]]):
    """A folder of images, as `ImageFolder` of torchvision reads it."""

    def __init__(self, folder: Path, decode: Any) -> None:
        self._paths = sorted(map(str, folder.rglob("*.jpg")))
        self._decode = decode

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with open(self._paths[index], "rb") as file:  # noqa: PTH123  # as ImageFolder does
            return self._decode(file.read()), int(self._paths[index].split("/")[-2])


def batches(contender: str, folder: Path, address: str) -> Iterator[Any]:
    """Batches without an end."""
    library, _, rest = contender.partition(", ")
    antialias = "no antialias" not in rest
    if library == "Gyre":
        kind = rest.split(", ")[0].split()[0].lower()
        field = "file" if kind == "folder" else "jpg"
        transform = chain(field, antialias=antialias, is_cached=contender.startswith(CACHED))
        yield from Loader(
            kind, batch_size=BATCH_SIZE, seed=1, epochs=None, address=address, transform=transform
        )
    is_ours = "our transforms" in rest
    decode = WithOurs(antialias=antialias) if is_ours else with_pillow
    workers: dict[str, Any] = {"num_workers": NUM_WORKERS, "persistent_workers": True}
    if library == "webdataset":
        import webdataset  # noqa: PLC0415  # one contender's alone

        warnings.simplefilter("ignore")
        tars = sorted(map(str, (folder / "stored/tars").glob("*.tar")))
        if rest == "object storage":
            url = (folder / "url").read_text()
            tars = [f"{url}/tars/{Path(each).name}" for each in tars]
        read = webdataset.WebDataset(tars, shardshuffle=len(tars)).shuffle(1000)
        pairs = read.to_tuple("jpg", "cls").map_tuple(decode, int).batched(BATCH_SIZE)
        loader: Any = webdataset.WebLoader(pairs, batch_size=None, **workers)
    elif library == "mosaicml-streaming":
        streaming.base.util.clean_stale_shared_memory()
        rows = streaming.StreamingDataset(
            local=str(folder / "mds"), shuffle=True, batch_size=BATCH_SIZE
        )
        decoding: Any = partial(_decoded_rows, decode)
        loader = DataLoader(rows, BATCH_SIZE, collate_fn=decoding, drop_last=True, **workers)
    else:
        files = Files(folder / "folder", decode)
        loader = DataLoader(files, BATCH_SIZE, shuffle=True, drop_last=True, **workers)
    while True:
        yield from loader


def _decoded_rows(decode: Any, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.stack([decode(row["jpg"]) for row in rows])
    return images, torch.tensor([row["cls"] for row in rows])


def run_job(contender: str, folder: Path, address: str) -> None:
    """Takes batches for a while; prints how many, in how long.

    It begins when it is told to, after its first batches, and ends when it is told to.
    """
    taken = batches(contender, folder, address)
    for _ in range(NUM_FIRST):
        next(taken)
    print("ready", flush=True)
    sys.stdin.readline()
    began_s, num = time.monotonic(), 0
    while time.monotonic() < began_s + RUN_S:
        next(taken)
        num += BATCH_SIZE
    print(json.dumps({"num": num, "elapsed_s": time.monotonic() - began_s}), flush=True)
    sys.stdin.readline()


def tell(job: "subprocess.Popen[str]") -> None:
    assert job.stdin
    job.stdin.write("\n")
    job.stdin.flush()


def line_of(job: "subprocess.Popen[str]") -> str:
    assert job.stdout
    return job.stdout.readline()


def measure(
    contender: str, num_jobs: int, folder: Path, address: str, pid: int
) -> tuple[float, float]:
    """Images/s of all jobs together, and milliseconds of processors for each image."""
    command = [sys.executable, "-m", "benchmarks.loader.samples.images", "--job", contender]
    command += ["--folder", str(folder), "--address", address]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        jobs = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(num_jobs)]
        for job in jobs:
            line_of(job)  # it is ready
        pids = [each for job in jobs for each in family(job.pid)]
        pids += family(pid) if contender.startswith("Gyre") else []
        pids = list(filter(_stays, pids))
        began_cpu_s = cpu_s(pids)
        for job in jobs:
            tell(job)
        found = [json.loads(line_of(job)) for job in jobs]
        used_s = cpu_s(pids) - began_cpu_s
        for job in jobs:
            tell(job)
    rate = sum(each["num"] / each["elapsed_s"] for each in found)
    return rate, used_s / sum(each["num"] for each in found) * 1000


def _stays(pid: int) -> bool:
    """Whether a process is none of those that webdataset starts for each tar that it fetches."""
    try:
        return psutil.Process(pid).name() != "curl"
    except psutil.NoSuchProcess:
        return False


def report(sizes: Sequence[int], found: Mapping[tuple[str, int], list[tuple[float, float]]]) -> str:
    rows = []
    medians = {
        key: tuple(statistics.median(column) for column in zip(*values, strict=True))
        for key, values in found.items()
    }
    first = medians[CONTENDERS[0], 1]
    for (contender, num_jobs), (rate, cpu) in medians.items():
        rates = [each[0] for each in found[contender, num_jobs]]
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        ratios = f"{rate / first[0]:.2f}", f"{first[1] / cpu:.2f}"
        rows.append(
            (contender, str(num_jobs), f"{rate:,.0f}", spread, ratios[0], f"{cpu:.2f}", ratios[1])
        )
    header = (
        *("contender", "jobs", "images/s together", "of all rounds", "times"),
        *("ms of processor per image", "times less"),
    )
    text = (
        f"{NUM_IMAGES:,} files of {min(sizes) >> 10} to {max(sizes) >> 10} KiB "
        f"({NUM_DIFFERENT} different ones), load average {load_average():.0f}."
    )
    return "\n".join([text, "", *table(header, rows)])


def fill_cache(address: str) -> None:
    """Decode all images once, in another order than the measured jobs."""
    transform = chain("file", antialias=True, is_cached=True)
    with Loader(
        "folder", batch_size=BATCH_SIZE, seed=2, epochs=1, address=address, transform=transform
    ) as loader:
        for _ in loader:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], help="contenders that have such a text")
    for flag in ("--job", "--folder", "--address"):
        parser.add_argument(flag, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        torch.set_num_threads(1)
        run_job(args.job, Path(args.folder), args.address)
        return
    with tempfile.TemporaryDirectory(prefix="gyre-images-") as temporary:
        folder = Path(temporary)
        sizes = write(folder)
        datasets: dict[str, dict[str, Any]] = {
            "folder": {"uri": str(folder / "folder"), "format": "files"},
            "tars": {"uri": str(folder / "stored/tars"), "format": "webdataset"},
            "parquet": {"uri": str(folder / "parquet"), "format": "parquet"},
        }
        runs = [(each, 1) for each in CONTENDERS] + [(each, 2) for each in IN_PAIRS]
        runs = [
            (each, num)
            for each, num in runs
            if each == CONTENDERS[0] or any(text in each for text in args.only)
        ]
        found: dict[tuple[str, int], list[tuple[float, float]]] = {run: [] for run in runs}
        stack = ExitStack()
        objects = stack.enter_context(object_server(folder / "stored"))
        objects.follow(FIRST_BYTE)
        (folder / "url").write_text(objects.url)
        settings = {f"storage.{key}": value for key, value in objects.storage_settings.items()}
        remote = {"uri": "s3://tars", "format": "webdataset", "cache": False}
        datasets["object"] = {**remote, **settings}
        with stack, daemon(folder, datasets, more=[f"cache_memory = {CACHE_BYTES}"]) as server:
            for kind in datasets:  # the daemon starts its processes before anything is counted
                field = "file" if kind == "folder" else "jpg"
                transform = chain(field, antialias=True)
                with Loader(
                    kind, batch_size=BATCH_SIZE, address=server.address, transform=transform
                ) as loader:
                    for _ in range(8):
                        next(loader)
            if any(CACHED in contender for contender, _ in runs):
                fill_cache(server.address)
            for _ in range(args.rounds):
                for contender, num_jobs in runs:
                    one = measure(contender, num_jobs, folder, server.address, server.pid)
                    found[contender, num_jobs].append(one)
                    print(contender, num_jobs, one, file=sys.stderr, flush=True)
        print(report(sizes, found))


if __name__ == "__main__":
    main()
