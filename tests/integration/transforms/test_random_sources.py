"""Mixtures whose sources have random transforms of their own, through a real daemon.

What a sample must be is computed here from seed, epoch and sample alone.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gyre_client import Loader
from gyre_client.errors import ConfigError, CorruptSample, CursorRejected
from gyre_daemon.transforms import Sample
from gyre_media.geometry import HorizontalFlip, RandomResizedCrop, Resize
from PIL import Image

from tests.batches import Batch, same, take
from tests.conftest import Daemon, StartDaemon, to_toml
from tests.daemons import status
from tests.drawn import cropped, generator, source_seed
from tests.elastic import OpenRank, Stage, in_stages
from tests.probe_transforms import install

SEED, BATCH, KEPT = 5, 12, 3
SIZES, LENGTHS = {"long": 37, "short": 11}, {"long": 9, "short": 5}


def crop(length: int, start: str = "random") -> dict[str, Any]:
    return {"name": "crop_or_pad", "field": "tokens", "length": length, "start": start}


def write_tokens(folder: Path) -> dict[str, dict[str, Any]]:
    """Two datasets of windows; no token is in two windows."""
    tables, first = {}, 0
    for name, size in SIZES.items():
        (folder / name).mkdir(parents=True)
        num = size * LENGTHS[name]
        np.arange(first, first + num, dtype=np.uint16).tofile(folder / name / "a.bin")
        first += num
        window = {"format": "tokens", "dtype": "uint16", "sequence_length": LENGTHS[name]}
        tables[name] = {"uri": str(folder / name), **window}
    return tables


@pytest.fixture
def daemon(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    """Serves `both`, whose source `long` is cropped at random and `short` is not."""
    tables = write_tokens(tmp_path / "data")
    tables["long"]["transforms"] = [crop(KEPT)]
    tables["short"]["transforms"] = [crop(KEPT, "beginning")]
    both = {"weights": {"long": 2, "short": 1}, "block": 12}
    deep = {"weights": {"cut": 3, "cut_long": 1}, "transforms": [crop(1)]}
    return gyred(
        {
            "datasets": tables,
            "mixtures": {
                "both": both,
                "cut": both | {"transforms": [crop(2)]},
                "cut_long": {"weights": {"long": 1}, "transforms": [crop(2)]},
                "deep": deep,
                "blind": both | {"transforms": [{"name": "drop", "field": "source"}]},
                "over_blind": {"weights": {"blind": 1}},
                "cached": both | {"transforms": [crop(2, "center"), {"name": "cache"}]},
            },
        }
    )


def loader(daemon: Daemon, name: str = "both", **keys: Any) -> Loader:
    values = {"batch_size": BATCH, "seed": SEED, "token_dtype": "stored", **keys}
    return Loader(name, address=daemon.address, **values)


def stored(sample: int) -> tuple[str, int, npt.NDArray[Any]]:
    """The source of a sample of `both`, its number there, and its tokens."""
    name = "long" if sample < SIZES["long"] else "short"
    own = sample if name == "long" else sample - SIZES["long"]
    length = LENGTHS[name]
    first = own * length if name == "long" else SIZES["long"] * LENGTHS["long"] + own * length
    return name, own, np.arange(first, first + length, dtype=np.uint16)


def of_both(sample: int, epoch: int, seed: int) -> npt.NDArray[Any]:
    name, own, tokens = stored(sample)
    if name == "short":
        return tokens[:KEPT]
    return cropped(tokens, KEPT, source_seed(seed, name), epoch, own)


def joined(parts: list[Batch]) -> Batch:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def test_each_sample_follows_from_seed_epoch_and_sample(daemon: Daemon) -> None:
    with loader(daemon) as alone:
        whole = take(alone, 16)
    seen: Counter[int] = Counter()
    for batch in whole:
        for row, sample in enumerate(batch["sample_id"].tolist()):
            wanted = of_both(sample, seen[sample], SEED)
            assert batch["tokens"][row].tolist() == wanted.tolist()
            seen[sample] += 1
    assert max(seen.values()) > 4  # epochs of the short one
    # as of a job on the source alone, under the source's seed
    with loader(daemon, "long", seed=source_seed(SEED, "long"), batch_size=1) as single:
        tokens = torch.cat([batch["tokens"] for batch in take(single, 50)])
    from_long = torch.cat([batch["tokens"][batch["source"] == 0] for batch in whole])
    assert torch.equal(from_long[:50], tokens)


def test_any_ranks_get_the_same_through_kills(daemon: Daemon) -> None:
    with loader(daemon) as alone:
        whole = take(alone, 24)

    def job(name: str) -> OpenRank:
        def open_rank(rank: int, world_size: int) -> Loader:
            return loader(daemon, job=name, rank=rank, world_size=world_size)

        return open_rank

    stages = [Stage(3, 7, kill_before=3), Stage(2, 9, kill_before=1), Stage(4, 8)]
    got, state = in_stages(daemon, job("elastic"), stages, joined)
    assert same(got, whole)
    with loader(daemon, seed=SEED + 1) as reseeded:
        assert not same(take(reseeded, 2), whole[:2])
    text = Path(daemon.config_path).read_text().replace('"length" = 3', '"length" = 4')
    daemon.reconfigure(text)
    with loader(daemon) as longer, pytest.raises(CursorRejected, match="of the source `"):
        longer.load_state_dict(state)


def test_two_jobs_share_what_is_made(daemon: Daemon) -> None:
    jobs = [loader(daemon, job=name, prefetch_batches=2) for name in ("one", "other")]
    with jobs[0] as one, jobs[1] as other:
        both = [(next(one), next(other)) for _ in range(40)]
    assert all(same([mine], [its]) for mine, its in both)
    # made once for both, but for what was made ahead of them
    assert status(daemon).num_samples_transformed < 0.75 * 2 * len(both) * BATCH


def test_a_sample_that_kills_under_one_seed_is_made_for_another(tmp_path: Path) -> None:
    tables = write_tokens(tmp_path / "data")
    tables["short"]["transforms"] = [{"name": "trouble", "unlucky": 0.2}]
    config, address = tmp_path / "gyre.toml", f"unix:{tmp_path}/run/gyre.sock"
    values = {
        "listen": [address],
        "index_dir": str(tmp_path / "index"),
        "installed_transforms": ["trouble"],
        "datasets": tables,
        "mixtures": {"all": {"weights": {"short": 1}}},
    }
    config.write_text(to_toml(values))
    environment = {"PYTHONPATH": str(install(tmp_path / "packages"))}
    daemon = Daemon(config, address, tmp_path / "log", environment)

    def num_deaths(seed: int) -> int:
        own = source_seed(seed, "short")
        draws = [generator(own, 0, sample).random() for sample in range(SIZES["short"])]
        return sum(draw < 0.2 for draw in draws)

    unlucky = next(seed for seed in range(99) if num_deaths(seed) == 1)
    lucky = next(seed for seed in range(99) if num_deaths(seed) == 0)
    keys = {"batch_size": SIZES["short"], "prefetch_batches": 1}
    daemon.start()
    try:
        for _ in range(2):
            with loader(daemon, "all", seed=unlucky, **keys) as one, pytest.raises(CorruptSample):
                next(one)
        with loader(daemon, "all", seed=lucky, **keys) as other:
            assert sorted(next(other)["sample_id"].tolist()) == list(range(SIZES["short"]))
    finally:
        daemon.stop()


def test_mixtures_with_transforms_are_sources_and_caches_come_before_chance(
    daemon: Daemon,
) -> None:
    with loader(daemon, "deep") as alone:
        whole = take(alone, 12)
    seen: Counter[int] = Counter()
    inner = source_seed(SEED, "cut")
    for batch in whole:
        for row, sample in enumerate(batch["sample_id"].tolist()):
            epoch, is_cut = seen[sample], sample < sum(SIZES.values())
            seed = inner if is_cut else source_seed(SEED, "cut_long")
            own = sample if is_cut else sample - sum(SIZES.values())
            two = cropped(of_both(own, epoch, seed), 2, seed, epoch, own)
            assert batch["tokens"][row].tolist() == cropped(two, 1, SEED, epoch, sample).tolist()
            seen[sample] += 1
    with pytest.raises(ConfigError, match=r"cache.*behind crop_or_pad of a source"):
        loader(daemon, "cached")
    with pytest.raises(ConfigError, match=r"`blind` make or drop the field `source`"):
        loader(daemon, "over_blind")


def test_images_are_augmented_by_source(gyred: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "images/0").mkdir(parents=True)
    pictures = [
        np.random.default_rng(number).integers(0, 256, (40 + number, 50, 3), np.uint8)
        for number in range(6)
    ]
    for number, pixels in enumerate(pictures):
        Image.fromarray(pixels).save(tmp_path / f"images/0/{number}.png")
    decode = {"name": "decode_image", "field": "file"}
    augment = [{"name": "random_resized_crop", "size": 16}, {"name": "horizontal_flip"}]
    table = {"uri": str(tmp_path / "images"), "format": "files"}
    daemon = gyred(
        {
            "datasets": {
                "drawn": table | {"transforms": [decode, *augment]},
                "plain": table | {"transforms": [decode, {"name": "resize", "size": [16, 16]}]},
                "wide": table | {"transforms": [decode, {"name": "resize", "size": [16, 24]}]},
            },
            "mixtures": {
                "both": {"weights": {"drawn": 1, "plain": 1}, "block": 12},
                "odd": {"weights": {"drawn": 1, "wide": 1}},
            },
        }
    )
    with loader(daemon) as source:
        batches = take(source, 4)
    crop_it, flip, resize = RandomResizedCrop(16), HorizontalFlip(), Resize((16, 16))
    place = 0
    for batch in batches:
        for row, sample in enumerate(batch["sample_id"].tolist()):
            made: Sample = {"image": pictures[sample % len(pictures)]}
            if sample < len(pictures):
                rng = generator(source_seed(SEED, "drawn"), place // len(pictures), sample)
                crop_it.apply(made, rng, {})
                flip.apply(made, rng, {})
                place += 1
            else:
                resize.apply(made, np.random.default_rng(), {})
            assert batch["image"][row].tolist() == made["image"].tolist()
    assert place == 4 * BATCH / 2
    with pytest.raises(
        ConfigError, match=r"`image` is uint8\[16, 16, 3\] in `drawn` and uint8\[16,"
    ):
        loader(daemon, "odd")
