"""Commands print what the pages show, and the examples of the front page run as they are."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from gyre_client import Loader
from gyre_daemon.config.load import load as load_daemon_config
from gyre_trainer.training.config import load
from PIL import Image

from tests.conftest import to_toml
from tests.fenced import blocks

SECONDS = 150


def test_the_configurations_of_the_training_pages_describe_runs(tmp_path: Path) -> None:
    """Their datasets are what a daemon takes. What a block leaves out is that of the first one."""
    (first,) = map(tomllib.loads, blocks("docs/training.md", "toml"))
    others = [tomllib.loads(each) for each in blocks("docs/training-configuration.md", "toml")]
    assert others
    for number, block in enumerate([first, *others]):
        path = tmp_path / f"{number}.toml"
        path.write_text(to_toml({"run": first["run"], **block}))
        data = load(path).data
        dataset = {"uri": data.dataset, "format": data.format, **data.options}
        path.write_text(to_toml({"datasets": {"page": dataset}}))
        assert list(load_daemon_config(path, {}, {}).config.datasets) == ["page"]


def write_tokens(folder: Path) -> None:
    folder.mkdir(parents=True)
    np.arange(1025 * 600, dtype=np.uint16).tofile(folder / "train.bin")


def write_tars(folder: Path) -> None:
    folder.mkdir(parents=True)
    with tarfile.open(folder / "images-000.tar", "w") as archive:
        for n in range(300):
            for extension, data in (
                ("jpg", b"\xff\xd8" + bytes([n % 256])),
                ("cls", str(n % 10).encode()),
            ):
                member = tarfile.TarInfo(f"{n:04}.{extension}")
                member.size = len(data)
                archive.addfile(member, BytesIO(data))


def run(code: str, folder: Path) -> list[str]:
    """The lines that a script prints; it may say nothing else, and warnings are errors."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=environment,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


@pytest.mark.parametrize(("word", "write"), [("tokens", write_tokens), ("webdataset", write_tars)])
def test_a_quick_start_of_the_front_page_runs_as_it_is(
    word: str, write: object, tmp_path: Path
) -> None:
    """But for its path, which is another here, and its loop, which ends after some batches."""
    (code,) = (each for each in blocks("README.md", "python") if f'format="{word}"' in each)
    assert len(code.splitlines()) <= 10
    (path,) = re.findall(r'Loader\("(/data/\w+)', code)
    write(tmp_path / "data")  # type: ignore[operator]
    assert run(code.replace(path, str(tmp_path / "data")), tmp_path)


def test_the_example_of_the_page_of_transforms_runs_as_it_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(128):
        folder = tmp_path / "photos" / f"class{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        height, width = rng.integers(20, 90, 2).tolist()
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    code = blocks("docs/transforms.md", "python")[0]
    shown = "torch.Size([64, 3, 224, 224]) torch.uint8 torch.Size([64])"
    assert run(code.replace("/data/photos", str(tmp_path / "photos")), tmp_path) == [shown] * 2


def test_the_example_of_boxes_on_that_page_runs_as_it_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "coco/train2017"
    folder.mkdir(parents=True)
    about: dict[str, list[dict[str, object]]] = {"images": [], "annotations": []}
    for number in range(32):
        pixels = rng.integers(0, 256, (90, 120, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:012}.jpg")
        about["images"].append({"id": number, "file_name": f"{number:012}.jpg"})
        about["annotations"] += [
            {"image_id": number, "category_id": 1, "bbox": rng.integers(1, 45, 4).tolist()}
            for _ in range(number % 5)
        ]
    (folder.parent / "annotations").mkdir()
    about["categories"] = [{"id": 1, "name": "person"}]
    path = folder.parent / "annotations/instances_train2017.json"
    path.write_text(json.dumps(about))
    (code,) = (each for each in blocks("docs/transforms.md", "python") if "detection = [" in each)
    shown = "torch.Size([16, 3, 512, 512]) torch.Size([16, 100, 4]) 16"
    assert run(code.replace("/data/coco", str(tmp_path / "coco")), tmp_path) == [shown] * 2


@pytest.mark.models
def test_the_example_of_yolo_runs_as_it_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for part in ("images/train", "labels/train"):
        (tmp_path / part).mkdir(parents=True)
    (tmp_path / "data.yaml").write_text("train: images/train\nnames: [person, bicycle]\n")
    for number in range(8):
        pixels = rng.integers(0, 256, (90, 120, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/train/{number}.jpg")
        line = f"{number % 2} 0.5 0.5 0.75 0.75\n"
        (tmp_path / f"labels/train/{number}.txt").write_text(line)
    (code,) = (each for each in blocks("docs/formats.md", "python") if "detection = [" in each)
    first, second = run(code.replace("/data/coco8", str(tmp_path)), tmp_path)
    for line in (first, second):
        assert re.fullmatch(r"torch\.Size\(\[4, 3, 640, 640\]\) \['(person|bicycle)'\]", line)


def test_transforms_of_that_page_are_found_beside_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = blocks("docs/transforms.md", "python")
    code = "\n\n".join(each for each in page if each.startswith("# my_transforms.py"))
    (tmp_path / "my_transforms.py").write_text(code)
    (tmp_path / "lines.txt").write_text("of words\n\nmore words here\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = []
    for name in ("CountBytes", "WordLengths"):
        transform = [{"name": f"my_transforms:{name}", "field": "text"}]
        with Loader(
            tmp_path / "lines.txt", batch_size=3, order="sequential", transform=transform
        ) as loader:
            found.append({key: each.tolist() for key, each in next(loader).items()})
    assert found[0]["num_bytes"] == [8, 0, 15]
    assert found[1]["lengths"] == [2, 5, 4, 5, 4]
    assert found[1]["lengths.offsets"] == [0, 2, 2, 5]


def test_the_front_page_makes_data_and_serves_it_to_several_ranks(tmp_path: Path) -> None:
    """The page's commands run as they are, except for their paths and the number of ranks."""
    with TemporaryDirectory(prefix="gyre-pages-") as short:  # the path of a socket is short

        def moved(block: str) -> str:
            return block.replace("/data/", f"{tmp_path}/data/").replace("/tmp/gyre/", f"{short}/")

        (make_data,) = (each for each in blocks("README.md", "sh") if "tofile(" in each)
        (serve,) = (each for each in blocks("README.md", "sh") if "torchrun" in each)
        (config,) = blocks("README.md", "toml")
        (train,) = (each for each in blocks("README.md", "python") if "train.py" in each)
        (tmp_path / "gyre.toml").write_text(moved(config))
        (tmp_path / "train.py").write_text(train)
        serve = moved(serve).replace("--nproc-per-node 8", "--nproc-per-node 2 --standalone")
        commands = f"({moved(make_data)})\ntrap 'kill %1; wait' EXIT\n{serve}"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        result = subprocess.run(
            ["bash", "-e", "-c", commands],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env=environment,
            cwd=tmp_path,
        )
    assert result.returncode == 0, result.stderr
    # 16 steps for each rank: an epoch is 1,023 windows of the page's 2**20 tokens
    assert result.stdout.count("torch.Size([32, 1025])") == 2 * 16, result.stdout
    assert (tmp_path / "state.pt").exists()
