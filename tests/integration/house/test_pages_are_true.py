"""Commands print what the pages show, and the examples of the front page run as they are."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
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


def test_the_configurations_of_the_training_page_describe_runs(tmp_path: Path) -> None:
    """Their datasets are what a daemon takes. What a block leaves out is that of the first one."""
    first, *others = map(tomllib.loads, blocks("docs/training.md", "toml"))
    for number, block in enumerate([first, *others]):
        path = tmp_path / f"{number}.toml"
        path.write_text(to_toml({"run": first["run"], **block}))
        data = load(path).data
        dataset = {"uri": data.dataset, "format": data.format, **data.options}
        path.write_text(to_toml({"datasets": {"page": dataset}}))
        assert list(load_daemon_config(path, {}, {}).config.datasets) == ["page"]


def write_photos(folder: Path, num_photos: int = 128) -> None:
    rng = np.random.default_rng(0)
    for number in range(num_photos):
        class_folder = folder / f"class{number % 3}"
        class_folder.mkdir(parents=True, exist_ok=True)
        height, width = rng.integers(20, 90, 2).tolist()
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(class_folder / f"{number}.jpg")


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


def test_the_loop_of_the_front_page_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for its path, and with a step that counts."""
    (code,) = blocks("README.md", "python")
    assert len(code.splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos")
    model = "import torch\nmodel = torch.nn.Linear(1, 1)\n"
    model += "def train(batch): print(len(batch['sample_id']))\n"
    code = code.replace("s3://bucket/images", "./photos").replace("batch_size=256", "batch_size=32")
    assert run(model + code, tmp_path) == ["32"] * 4 * 10
    assert (tmp_path / "last.pt").exists()


def test_the_example_of_the_page_of_transforms_runs_as_it_is(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
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


TRAIN = """
import torch.distributed
from gyre_client import Loader
torch.distributed.init_process_group("gloo")
for batch in Loader("photos", batch_size=32):
    print(len(batch["sample_id"]), flush=True)
torch.distributed.destroy_process_group()
"""


def test_the_front_page_serves_a_folder_to_a_shell_and_to_several_ranks() -> None:
    """The commands run as they are, with two ranks and one picture of `gyre top`."""
    shell = blocks("README.md", "sh")
    (look,) = (each for each in shell if "python -c" in each)
    (serve,) = (each for each in shell if "torchrun" in each)
    serve = serve.replace("--nproc-per-node 4", "--nproc-per-node 2 --standalone")
    serve = serve.replace("gyre top ", "gyre top --once ")
    with TemporaryDirectory(prefix="gyre-pages-") as folder:  # the path of a socket is short
        write_photos(Path(folder) / "photos")
        (Path(folder) / "train.py").write_text(TRAIN)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "XDG_CACHE_HOME": f"{folder}/cache"}
        process = subprocess.Popen(
            ["bash", "-e", "-c", f"trap 'trap - TERM; kill -- -$$' EXIT\n{look}\n{serve}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = output.splitlines()
    assert sum(line.startswith("{'") for line in lines) == 4, (output, errors)
    assert lines.count("16") == 2 * 4, (output, errors)
    assert any("sessions," in line or "no session" in line for line in lines), (output, errors)
