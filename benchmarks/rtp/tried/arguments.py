"""Arguments of all kinds for tiny models; `NUM_ROWS` rows are in front."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.rtp.tried.sizes import IMAGE_TOKEN, NUM_ROWS, NUM_TOKENS, Arguments


def _ids(generator: torch.Generator, *, low: int = 3, tokens: int = NUM_TOKENS) -> Tensor:
    return torch.randint(low, 36, (NUM_ROWS, tokens), generator=generator)


def _text(config: Any, g: torch.Generator) -> Arguments:
    rows = _ids(g)
    return {"input_ids": rows, "labels": rows}


def _pixels(g: torch.Generator, size: int) -> Tensor:
    return torch.randn(NUM_ROWS, 3, size, size, generator=g, dtype=torch.float64)


def _size_of(config: Any) -> int:
    size = getattr(getattr(config, "vision_config", config), "image_size", 8)
    return int(size if isinstance(size, int) else size[0])


def _image_of(config: Any, g: torch.Generator) -> Arguments:
    if config.model_type in ("resnet", "regnet", "levit"):
        size = 64 if config.model_type == "levit" else 32
    else:
        size = max(_size_of(config), 8)
    if size > 64:
        size = 16
    labels = torch.arange(NUM_ROWS) % 2
    return {"pixel_values": _pixels(g, size), "labels": labels}


def _noised(config: Any, g: torch.Generator) -> Arguments:
    return {"pixel_values": _pixels(g, 8), "noise": torch.rand(NUM_ROWS, 4, generator=g)}


def _maps(config: Any, g: torch.Generator) -> Arguments:
    labels = torch.randint(2, (NUM_ROWS, 16, 16), generator=g)
    return {"pixel_values": _pixels(g, 16), "labels": labels}


def _depth(config: Any, g: torch.Generator) -> Arguments:
    return {"pixel_values": _pixels(g, 8)}


def _boxes(config: Any, g: torch.Generator) -> Arguments:
    size = 8 if config.model_type == "yolos" else 32
    boxes = 0.2 + 0.2 * torch.rand(NUM_ROWS, 2, 4, generator=g, dtype=torch.float64)
    each = [{"class_labels": torch.tensor([0, 1]), "boxes": row} for row in boxes]
    return {"pixel_values": _pixels(g, size), "labels": each}


def _with_image(g: torch.Generator, num: int) -> Arguments:
    rows = _ids(g)
    rows[:, 1 : 1 + num] = IMAGE_TOKEN
    labels = rows.masked_fill(rows == IMAGE_TOKEN, -100)
    return {"input_ids": rows, "labels": labels, "attention_mask": torch.ones_like(rows)}


def _seen(config: Any, g: torch.Generator) -> Arguments:
    arguments = _with_image(g, 4) | {"pixel_values": _pixels(g, 8)}
    if config.model_type in ("gemma3", "paligemma"):
        arguments["token_type_ids"] = (arguments["input_ids"] == IMAGE_TOKEN).long()
    return arguments


def _tiles(config: Any, g: torch.Generator) -> Arguments:
    return _with_image(g, 4) | {"pixel_values": _pixels(g, 8)[:, None]}


def _tiles_of_aspects(config: Any, g: torch.Generator) -> Arguments:
    rows = _ids(g)
    return {
        "input_ids": rows,
        "labels": rows,
        "attention_mask": torch.ones_like(rows),
        "pixel_values": _pixels(g, 8)[:, None, None],
        "aspect_ratio_ids": torch.ones(NUM_ROWS, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(NUM_ROWS, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(NUM_ROWS, NUM_TOKENS, 1, 1, dtype=torch.long),
    }


def _patches(config: Any, g: torch.Generator) -> Arguments:
    pixels = torch.randn(NUM_ROWS * 4, 3 * 16, generator=g, dtype=torch.float64)
    grid = torch.tensor([[1, 2, 2]]).expand(NUM_ROWS, -1).contiguous()
    arguments = _with_image(g, 4)
    arguments["input_ids"][:, 0] = 37
    return arguments | {"pixel_values": pixels, "image_grid_thw": grid}


def _pairs(config: Any, g: torch.Generator) -> Arguments:
    rows = _ids(g)
    rows[:, -1] = 2
    return {"input_ids": rows, "pixel_values": _pixels(g, 8), "return_loss": True}


def _captions(config: Any, g: torch.Generator) -> Arguments:
    return _text(config, g) | {"pixel_values": _pixels(g, 8)}


def _sound(g: torch.Generator, tokens: int = 128) -> Tensor:
    return torch.randn(NUM_ROWS, tokens, generator=g, dtype=torch.float64)


def _speech(config: Any, g: torch.Generator) -> Arguments:
    return {"input_values": _sound(g), "labels": _ids(g, tokens=3)}


def _sounds(config: Any, g: torch.Generator) -> Arguments:
    return {"input_values": _sound(g, 2000), "labels": _ids(g, tokens=3)}


def _features(config: Any, g: torch.Generator) -> Arguments:
    features = torch.randn(NUM_ROWS, 8, 16, generator=g, dtype=torch.float64)
    return {"input_features": features, "labels": _ids(g)}


def _spectra(config: Any, g: torch.Generator) -> Arguments:
    features = torch.randn(NUM_ROWS, 16, 8, generator=g, dtype=torch.float64)
    return {"input_features": features, "labels": _ids(g)}


def _spectrum_classes(config: Any, g: torch.Generator) -> Arguments:
    features = torch.randn(NUM_ROWS, 8, 8, generator=g, dtype=torch.float64)
    return {"input_values": features, "labels": torch.arange(NUM_ROWS) % 2}


def _classes(config: Any, g: torch.Generator) -> Arguments:
    return {"input_ids": _ids(g), "labels": torch.arange(NUM_ROWS) % 3}


def _spans(config: Any, g: torch.Generator) -> Arguments:
    starts = torch.arange(NUM_ROWS) % NUM_TOKENS
    return {"input_ids": _ids(g), "start_positions": starts, "end_positions": starts}


def _decisions(config: Any, g: torch.Generator) -> Arguments:
    def random(width: int) -> Tensor:
        return torch.randn(NUM_ROWS, 4, width, generator=g, dtype=torch.float64)

    return {
        "states": random(3),
        "actions": random(2),
        "rewards": random(1),
        "returns_to_go": random(1),
        "timesteps": torch.arange(4).expand(NUM_ROWS, -1).contiguous(),
        "attention_mask": torch.ones(NUM_ROWS, 4),
    }


def _series(config: Any, g: torch.Generator) -> Arguments:
    past = torch.randn(NUM_ROWS, 16, 2, generator=g, dtype=torch.float64)
    future = torch.randn(NUM_ROWS, 4, 2, generator=g, dtype=torch.float64)
    return {"past_values": past, "future_values": future}


def _dated_series(config: Any, g: torch.Generator) -> Arguments:
    def random(*shape: int) -> Tensor:
        return torch.rand(NUM_ROWS, *shape, generator=g, dtype=torch.float64)

    return {
        "past_values": random(10),
        "past_time_features": random(10, 1),
        "past_observed_mask": torch.ones(NUM_ROWS, 10),
        "future_values": random(4),
        "future_time_features": random(4, 1),
    }


KINDS: dict[str, Callable[[Any, torch.Generator], Arguments]] = {
    "text": _text,
    "classes": _classes,
    "spans": _spans,
    "image": _image_of,
    "noised image": _noised,
    "maps": _maps,
    "depth": _depth,
    "boxes": _boxes,
    "seeing": _seen,
    "tiles": _tiles,
    "tiles of aspects": _tiles_of_aspects,
    "patches": _patches,
    "pairs": _pairs,
    "captions": _captions,
    "speech": _speech,
    "speech to text": _speech,
    "sounds": _sounds,
    "features": _features,
    "spectra": _spectra,
    "spectrum classes": _spectrum_classes,
    "decisions": _decisions,
    "series": _series,
    "dated series": _dated_series,
}
