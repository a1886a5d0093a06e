"""Random crops of large JPEG files: decoded whole, and no larger than the crops need.

`python -m benchmarks.loader.samples.decode_crop [--rounds 7]`

Processor time of one thread for an image, from the bytes of a file to 224 pixels square, and how
far pixels are from those of files that are decoded whole. The ways take turns in each round, over
the same files and seeds.
"""

import argparse
import io
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from gyre_daemon.transforms import Transform
from gyre_media.decode_image import FACTORS, DecodeImage, DecodeRandomResizedCrop
from gyre_media.geometry import RandomResizedCrop
from PIL import Image

from benchmarks.loader.markdown import table
from benchmarks.loader.processes import load_average

SIZE, NUM_FILES, NUM_SEEDS = 224, 12, 4
LENGTHS = {"2,000 x 1,500": (1500, 2000), "500 x 375": (375, 500)}
GAPS = (1.0, 2.0)
WHOLE: Sequence[Transform] = (DecodeImage("jpg"), RandomResizedCrop(SIZE))
HEADER = (
    "pixels",
    "kB",
    "way",
    "ms",
    "times less",
    "in each round",
    "% decoded at 1, 1/2, 1/4, 1/8",
    "off on average",
    "at most",
)


def photograph(rng: np.random.Generator, height: int, width: int) -> bytes:
    """A picture with noise, whose detail is some pixels wide."""
    pixels = np.zeros((height, width, 3))
    for grain, weight in ((8, 0.1), (32, 0.3), (128, 0.6)):
        coarse = rng.integers(0, 256, (height // grain + 2, width // grain + 2, 3), np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        pixels += weight * np.asarray(smooth)
    pixels += rng.normal(0, rng.uniform(3, 10), pixels.shape)
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def made(chain: Sequence[Transform], file: bytes, seed: int) -> np.ndarray[Any, Any]:
    sample = {"jpg": np.frombuffer(file, np.uint8)}
    rng = np.random.default_rng(seed)
    for transform in chain:
        transform.apply(sample, rng, {})
    return sample["image"]


def cpu_ms(chain: Sequence[Transform], files: list[bytes]) -> float:
    """Of an image."""
    begin = time.process_time()
    for file in files:
        for seed in range(NUM_SEEDS):
            made(chain, file, seed)
    return (time.process_time() - begin) / len(files) / NUM_SEEDS * 1e3


def differences(crop: DecodeRandomResizedCrop, files: list[bytes]) -> list[str]:
    """How far pixels are from those of `WHOLE`."""
    found = [
        np.abs(made([crop], file, seed).astype(int) - made(WHOLE, file, seed))
        for file in files
        for seed in range(NUM_SEEDS)
    ]
    return [f"{np.mean(found):.2f}", str(np.max(found))]


def shares(crop: DecodeRandomResizedCrop, height: int, width: int) -> str:
    """How many of a hundred images are decoded at which factor."""
    boxes = [
        RandomResizedCrop(SIZE).box(height, width, np.random.default_rng(seed))
        for seed in range(1000)
    ]
    counts = Counter(crop.factor(box[2], box[3]) for box in boxes)
    return ", ".join(f"{counts[factor] / 10:.0f}" for factor in (1, *FACTORS))


def rows(name: str, files: list[bytes], num_rounds: int) -> list[list[str]]:
    crops = [DecodeRandomResizedCrop("jpg", SIZE, reducing_gap=gap) for gap in GAPS]
    ways: list[Sequence[Transform]] = [WHOLE, *([crop] for crop in crops)]
    times = np.zeros((num_rounds, len(ways)))
    for number in range(num_rounds):
        for place in np.roll(range(len(ways)), number).tolist():  # another one begins each round
            times[number, place] = cpu_ms(ways[place], files)
    medians, ratios = np.median(times, axis=0), times[:, :1] / times
    size = f"{statistics.mean(map(len, files)) / 1e3:.0f}"
    found = [[name, size, "decoded whole", f"{medians[0]:.2f}", "1", "", "100, 0, 0, 0", "", ""]]
    for place, crop in enumerate(crops, 1):
        found.append(
            [
                name,
                size,
                f"reducing_gap = {crop.reducing_gap:g}",
                f"{medians[place]:.2f}",
                f"{np.median(ratios[:, place]):.2f}",
                f"{ratios[:, place].min():.2f} to {ratios[:, place].max():.2f}",
                shares(crop, *LENGTHS[name]),
                *differences(crop, files),
            ]
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    num_rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)
    found = []
    for name, lengths in LENGTHS.items():
        files = [photograph(rng, *lengths) for _ in range(NUM_FILES)]
        found += rows(name, files, num_rounds)
    print("\n".join(table(HEADER, found)))
    print(f"\nload average {load_average():.1f}")


if __name__ == "__main__":
    main()
