"""The cost of the copy from an exchange into a slot: `python -m benchmarks.loader.parts.exchange`.

A process writes a portion of 16 images into an exchange, as a transform worker does, and this one
copies them into a slot of an arena, as the daemon does. The table also has one image's cost in the
worker: a JPEG file is decoded, cropped to 224 pixels square, and flipped, and stays uint8 (150 kB),
or is normalised to float32 (600 kB).
"""

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
from gyre_daemon.memory.arenas import Arena
from gyre_daemon.transforms.recipes import Field, Transform
from gyre_daemon.transforms.worker import Chain
from gyre_daemon.workers.compute_workers import Exchange
from gyre_media.colors import Normalize, ToChw
from gyre_media.decode_image import DecodeImage
from gyre_media.geometry import HorizontalFlip, RandomResizedCrop

from benchmarks.loader.markdown import table
from benchmarks.loader.samples.images import SIZE, jpeg

PORTION, NUM_SLOTS, NUM_ROUNDS, NUM_IMAGES = 16, 8, 5, 200
LAST: dict[str, tuple[str, Transform]] = {
    "uint8": ("to_chw", ToChw()),
    "float32": ("normalize", Normalize()),
}
ITEM_BYTES = {"uint8": 1, "float32": 4}


def copy_s(num_bytes: int, num_portions: int) -> float:
    """Seconds of this thread for each copied sample."""
    exchange, arena = Exchange(PORTION * num_bytes), Arena(NUM_SLOTS * (PORTION * num_bytes + 4096))
    arena.allocate(0, arena.num_bytes)
    arena.seal()
    slots = [arena.take(PORTION * num_bytes) for _ in range(NUM_SLOTS)]
    mine, theirs = multiprocessing.get_context("fork").Pipe()
    worker = multiprocessing.get_context("fork").Process(target=_write, args=(exchange, theirs))
    worker.start()
    taken_s, into = 0.0, None
    try:
        for number in range(num_portions):
            mine.send_bytes(bytes([1 + number % 255]))
            mine.recv_bytes()
            slot = slots[number % NUM_SLOTS]
            assert slot
            began = time.thread_time()
            with arena.lease():
                into = np.frombuffer(slot.memory, np.uint8)
                into[: PORTION * num_bytes] = exchange.memory[: PORTION * num_bytes]
            taken_s += time.thread_time() - began
    finally:
        worker.kill()
        worker.join()
        into = None  # the view of a slot
        arena.close()
        exchange.close()
    return taken_s / num_portions / PORTION


def _write(exchange: Exchange, told: Connection) -> None:
    """Writes each byte of the exchange whenever it is told to."""
    while True:
        value = told.recv_bytes()
        exchange.memory[:] = value[0]
        told.send_bytes(value)


def made_s(kind: str, images: Sequence[bytes]) -> float:
    """Processor seconds for each image."""
    steps: list[tuple[str, Transform]] = [
        ("decode_image", DecodeImage("file")),
        ("random_resized_crop", RandomResizedCrop(SIZE)),
        ("horizontal_flip", HorizontalFlip()),
        LAST[kind],
    ]
    chain = Chain(steps, {"file": Field(np.dtype(np.uint8), (None,))})
    out, rng = chain.scratch(), np.random.default_rng(0)
    began = time.process_time()
    for data in images:
        chain.apply({"file": np.frombuffer(data, np.uint8)}, rng, out)
    return (time.process_time() - began) / len(images)


def main() -> None:
    """Print the table: medians of rounds in turns."""
    generator = np.random.default_rng(0)
    images = [jpeg(generator) for _ in range(NUM_IMAGES)]
    copied: dict[str, list[float]] = {kind: [] for kind in LAST}
    made: dict[str, list[float]] = {kind: [] for kind in LAST}
    for _ in range(NUM_ROUNDS):
        for kind in LAST:
            num_bytes = 3 * SIZE * SIZE * ITEM_BYTES[kind]
            copied[kind].append(copy_s(num_bytes, 60))
            made[kind].append(made_s(kind, images))
    rows = []
    for kind in LAST:
        copy, make = statistics.median(copied[kind]), statistics.median(made[kind])
        num_bytes = 3 * SIZE * SIZE * ITEM_BYTES[kind]
        rows.append(
            (
                f"{kind}, {num_bytes / 1e3:.0f} kB",
                f"{copy * 1e6:.0f} us",
                f"{num_bytes / copy / 1e9:.1f} GB/s",
                f"{make * 1e6:.0f} us",
                f"{copy / make:.3f}",
            )
        )
    header = ("sample", "copy", "rate", "to make it", "copy, of that")
    print("\n".join(table(header, rows)))


if __name__ == "__main__":
    main()
