"""Images that worker processes decode, crop and round, through a real daemon."""

import hashlib
import io
import json
import struct
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import ConfigError, CorruptSample
from gyre_client.transport.connection import Connection
from gyre_media.geometry import RandomResizedCrop
from numpy.testing import assert_array_equal
from PIL import Image

from tests.conftest import Daemon, to_toml
from tests.preloaded.interpreter import Interpreter

SMALL: Sequence[Mapping[str, Any]] = [
    {"name": "decode_image", "field": "jpg"},
    {"name": "center_crop", "size": 16},
]
HALF: Mapping[str, Any] = {"name": "normalize", "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter) -> Iterator[Daemon]:
    """A daemon that serves pictures as they are, and as `halves` in half precision."""
    folder = tmp_path_factory.mktemp("images")
    pictures = {"uri": str(write_pictures(folder / "pictures")), "format": "webdataset"}
    address, config = f"unix:{folder}/run/gyre.sock", folder / "gyre.toml"
    halves = pictures | {"transforms": [*SMALL, HALF]}
    values = {
        "listen": [address],
        "index_dir": str(folder / "index"),
        "drain_timeout_s": 3.0,
        "num_transform_workers": 2,
        "datasets": {"pictures": pictures, "halves": halves},
    }
    config.write_text(to_toml(values))
    daemon = Daemon(config, address, folder / "log", {}, interpreter=interpreter)
    yield daemon.start()
    daemon.stop()


def write_pictures(folder: Path) -> Path:
    """Writes a tar of seven images with their classes; the sixth is damaged."""
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number in range(7):
            pixels = np.random.default_rng(number).integers(0, 256, (40 + number, 50, 3), np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG")
            data = buffer.getvalue()[: 700 if number == 5 else None]
            for name, content in ((f"{number}.jpg", data), (f"{number}.cls", b"%d" % number)):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return folder


def arrays(batch: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.numpy().copy() for name, tensor in batch.items()}


def test_images_are_those_of_pillow_and_a_damaged_one_is_named(daemon: Daemon) -> None:
    chain: Sequence[Mapping[str, Any]] = [
        {"name": "decode_image", "field": "jpg"},
        {"name": "random_resized_crop", "size": 24, "interpolation": "bicubic"},
        {"name": "horizontal_flip"},
        {"name": "to_chw"},
    ]
    with tarfile.open(Path(daemon.config_path).parent / "pictures/a.tar") as tar:
        files = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    arguments: dict[str, Any] = {"address": daemon.address, "order": "sequential", "seed": 3}
    with Loader("pictures", batch_size=5, transform=chain, **arguments) as source:
        batch = arrays(next(source))
        assert list(batch) == ["sample_id", "image", "cls"]
        assert batch["cls"].tolist() == [0, 1, 2, 3, 4]
        for number, image in enumerate(batch["image"]):
            key = hashlib.blake2b(struct.pack("<3Q", 3, 0, number), digest_size=16).digest()
            rng = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
            pixels = Image.open(io.BytesIO(files[f"{number}.jpg"])).convert("RGB")
            top, left, height, width = RandomResizedCrop(24).box(pixels.height, pixels.width, rng)
            part = pixels.crop((left, top, left + width, top + height))
            wanted = np.asarray(part.resize((24, 24), Image.Resampling.BICUBIC))
            if rng.random() < 0.5:
                wanted = wanted[:, ::-1]
            assert_array_equal(image.transpose(1, 2, 0), wanted)
        with pytest.raises(CorruptSample, match=r"sample 5 .*a\.tar.*decode_image: it is no image"):
            next(source)
    one = {**chain[1], "name": "decode_random_resized_crop", "field": "jpg"}
    with Loader("pictures", batch_size=5, transform=[one, *chain[2:]], **arguments) as source:
        same = arrays(next(source))
        assert_array_equal(same["image"], batch["image"])
        with pytest.raises(CorruptSample, match="decode_random_resized_crop: it is no image"):
            next(source)
    for option in ({"reducing_gap": 0.5}, {"interpolation": "nearest"}):
        where = rf"{next(iter(option))} in transforms\[0\] \(decode_random_resized_crop\) is"
        with pytest.raises(ConfigError, match=where):
            next(Loader("pictures", batch_size=5, transform=[{**one, **option}], **arguments))


def test_half_precision_is_that_of_torch(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: dict[str, Any] = {"address": daemon.address, "order": "sequential"}
    casts: list[Mapping[str, Any]] = [
        {"name": "cast", "field": "image", "dtype": "float16"},
        {"name": "cast", "field": "image", "dtype": "bfloat16"},
        {"name": "crop_or_pad", "field": "image", "length": 20, "value": 2},
    ]
    found = []
    for more in ([{"name": "normalize"}], [HALF], [], casts):
        with Loader("pictures", batch_size=4, transform=[*SMALL, *more], **arguments) as source:
            found.append(next(source)["image"].clone())
    whole, half, pixels, cast = found
    assert half.dtype == cast.dtype == torch.bfloat16
    assert torch.equal(half, whole.bfloat16())
    assert torch.equal(cast[:, :16], pixels.bfloat16())
    assert (cast[:, 16:] == 2).all()
    assert main(["cat", "halves", "--num", "1", "--json", "--address", daemon.address]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["fields"]["image"]["dtype"] == "bfloat16"
    assert shown["fields"]["image"]["value"] == half[shown["sample_id"]].tolist()


def test_no_image_is_decoded_that_no_iteration_uses(tmp_path: Path) -> None:
    """An iteration is read to its end, and the next one only once it has begun."""
    for number in range(24):
        Image.new("RGB", (20, 20), (number, 0, 0)).save(tmp_path / f"{number:02}.jpg")
    decode = [{"name": "decode_image", "field": "file"}, SMALL[1]]
    with Loader(str(tmp_path), batch_size=4, transform=decode) as loader:
        connection, counts = Connection(loader._place.target.address), []
        for _ in range(2):
            assert len(list(loader)) == 6
            counts.append(connection.status().num_samples_transformed)
        next(loader)  # reads on without an end
        counts.append(connection.status().num_samples_transformed)
        connection.close()
    assert counts[:2] == [24, 48]
    assert counts[2] > 48
