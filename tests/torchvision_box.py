"""The documented algorithm of torchvision's random crop."""

import math

import numpy as np


def torchvision_box(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """`RandomResizedCrop.get_params` of torchvision with its defaults, draw by draw."""
    area = height * width
    for _ in range(10):
        target_area = area * rng.uniform(0.08, 1.0)
        aspect_ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w = round(math.sqrt(target_area * aspect_ratio))
        h = round(math.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            i = rng.integers(0, height - h + 1)
            j = rng.integers(0, width - w + 1)
            return int(i), int(j), h, w
    in_ratio = width / height
    w, h = width, height
    if in_ratio < 3 / 4:
        h = round(w / (3 / 4))
    elif in_ratio > 4 / 3:
        w = round(h * (4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w
