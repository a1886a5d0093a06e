"""Draws page-*.png, for the page on `gyre page` and the front page.

`PYTHONPATH=. python docs/images/draw_page.py [--keep]`, in an environment with Playwright and
Debian's chromium. A daemon serves four jobs on data that is drawn here: pictures behind an object
server that answers late, sounds that are decoded slowly, conversations, and a model that
`gyre-train` trains on text with a few samples of noise. With --keep the daemon goes on until
Enter, to look at the page.
"""

import argparse
import io
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image, ImageDraw, ImageFilter
from playwright.sync_api import Page, sync_playwright
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.object_server.process import object_server
from tests.object_server.script import Script

FOLDER = Path(__file__).parent
CHROMIUM = "/usr/bin/chromium"
FIRST_BYTE = Script(first_byte_p50_s=0.15, first_byte_p99_s=1.2)
NEAR = Script(first_byte_p50_s=0.01, first_byte_p99_s=0.08)
WINDOW = 257  # bytes of a sample of the trained model
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}\n{% endfor %}"
)
TALKS = (
    ("How do tides come about?", "The Moon pulls the near side of the Earth more than its centre."),
    ("Write a haiku about a loader.", "Shards wait in the dark;\na permutation calls them,\nonce."),
    ("What is 17 times 23?", "17 times 23 is 391: 17 times 20 is 340, and 17 times 3 is 51."),
    ("Why is bread salted?", "Salt tightens gluten, slows the yeast, and lets the crust brown."),
    ("Name a bird that cannot fly.", "The kakapo, a parrot of New Zealand. It climbs trees."),
    (
        "Explain rotation.",
        "Each rank keeps a slice of the weights, and the slices travel round a ring.",
    ),
)
SKIES = (
    ((30, 58, 95), (244, 178, 122)),
    ((18, 35, 66), (250, 214, 165)),
    ((86, 130, 168), (240, 236, 214)),
    ((60, 40, 86), (240, 130, 120)),
    ((20, 70, 80), (220, 230, 170)),
)


def landscape(seed: int) -> bytes:
    """A hilly landscape as JPEG; no two seeds look alike."""
    rng = np.random.default_rng(seed)
    width, height = 288, 216
    sky = np.array(SKIES[seed % len(SKIES)], float)
    share = np.linspace(0, 1, height)[:, None] ** 1.3
    picture = Image.fromarray(
        np.broadcast_to((sky[0] + (sky[1] - sky[0]) * share)[:, None], (height, width, 3)).astype(
            np.uint8
        )
    )
    draw = ImageDraw.Draw(picture)
    x, y, radius = rng.uniform(40, width - 40), rng.uniform(30, 110), rng.uniform(12, 26)
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(255, 243, 214))
    picture = picture.filter(ImageFilter.GaussianBlur(0.8))
    draw = ImageDraw.Draw(picture)
    ground = np.array((rng.uniform(20, 60), rng.uniform(60, 110), rng.uniform(50, 90)))
    for layer in range(5):
        depth = layer / 4
        waves = [
            (rng.uniform(0.006, 0.03) * (1 + depth), rng.uniform(0, 6.3), rng.uniform(5, 22))
            for _ in range(3)
        ]
        ridge = [
            height * (0.5 + 0.11 * layer) + sum(a * math.sin(f * each + p) for f, p, a in waves)
            for each in range(width)
        ]
        colour = sky[1] * (0.65 - 0.6 * depth) + ground * (0.35 + 0.35 * depth)
        fill = (int(colour[0]), int(colour[1]), int(colour[2]))
        draw.polygon([(0, height), *enumerate(ridge), (width, height)], fill=fill)
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=88)
    return data.getvalue()


def sound(seed: int) -> bytes:
    """A few notes as FLAC."""
    rng = np.random.default_rng(seed)
    notes = []
    for _ in range(8):
        time_s = np.arange(4000) / 16000
        pitch = 220 * 2 ** (rng.integers(0, 24) / 12)
        notes.append(np.sin(6.283 * pitch * time_s) * np.exp(-6 * time_s) * 0.4)
    data = io.BytesIO()
    soundfile.write(data, np.concatenate(notes).astype(np.float32), 16000, format="FLAC")
    return data.getvalue()


def write_tar(path: Path, samples: list[dict[str, bytes]], first: int) -> None:
    """Writes one shard of samples, whose files end so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, sample in enumerate(samples, first):
            for ending, data in sample.items():
                info = tarfile.TarInfo(f"{number:06}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def write_data(folder: Path) -> None:
    """Writes all data of the scene."""
    for shard in range(16):
        first = shard * 60
        photos = [
            {"jpg": landscape(each), "cls": str(each % 5).encode()}
            for each in range(first, first + 60)
        ]
        write_tar(folder / "bucket" / f"train-{shard:04}.tar", photos, first)
    for shard in range(4):
        first = shard * 40
        sounds = [
            {"flac": sound(each), "txt": f"melody {each}, eight notes".encode()}
            for each in range(first, first + 40)
        ]
        write_tar(folder / "speech" / f"notes-{shard:02}.tar", sounds, first)
    (folder / "talks").mkdir()
    with (folder / "talks" / "talks.jsonl").open("w") as file:
        for number in range(600):
            asked, answer = TALKS[number % len(TALKS)]
            more, last = TALKS[(number // 6 + 1) % len(TALKS)]
            roles = (("user", asked), ("assistant", answer), ("user", more), ("assistant", last))
            file.write(
                json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]})
                + "\n"
            )
    write_tokenizer(folder / "talks")
    write_text(folder / "stories")


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of the talks, with its chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for talk in TALKS for text in talk] * 4, trainer)
    (folder / "tokens").mkdir()
    tokenizer.save(str(folder / "tokens" / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE}
    (folder / "tokens" / "tokenizer_config.json").write_text(json.dumps(settings))


def write_text(folder: Path) -> None:
    """Sources of the standard library as bytes; a few windows of them are noise."""
    folder.mkdir()
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in sources)[: 1600 * (WINDOW - 1)]
    tokens = np.frombuffer(text, np.uint8).copy()
    rng = np.random.default_rng(5)
    for each in range(100, 1600, 250):
        tokens[each * (WINDOW - 1) : (each + 2) * (WINDOW - 1)] = rng.integers(
            128, 256, 2 * (WINDOW - 1)
        )
    for shard, part in enumerate(np.array_split(tokens, 6)):
        part.tofile(folder / f"stories-{shard}.bin")


def configuration(folder: Path, far: str, near: str) -> str:
    """The configuration of the daemon."""
    return f"""
listen = ["unix:{folder}/run/gyre.sock"]
memory_budget = "512MiB"
cache_memory = "6MiB"
[datasets.landscapes]
uri = "{far}/bucket/train-{{0000..0015}}.tar"
format = "webdataset"
[datasets.speech]
uri = "{near}/speech/notes-{{00..03}}.tar"
format = "webdataset"
cache = false
[[datasets.speech.transforms]]
name = "decode_audio"
field = "flac"
rate = 16000
[[datasets.speech.transforms]]
name = "crop_or_pad"
field = "audio"
length = 32000
[[datasets.speech.transforms]]
name = "log_mel"
rate = 16000
[datasets.talks]
uri = "{folder}/talks/talks.jsonl"
[[datasets.talks.transforms]]
name = "chat"
field = "json"
tokenizer = "{folder}/talks/tokens/tokenizer.json"
[datasets.stories]
uri = "{folder}/stories"
format = "tokens"
dtype = "uint8"
sequence_length = {WINDOW}
stride = {WINDOW - 1}
"""


TRAIN = f"""
[run]
steps = 5000
log_every = 2
device = "cpu"
threads = 1
[data]
dataset = "stories"
batch_size = 4
sequence_length = {WINDOW - 1}
seed = 5
[model]
vocab_size = 256
num_layers = 2
dim = 96
num_heads = 4
num_kv_heads = 4
hidden_dim = 256
[optimizer]
lr = 3e-3
warmup_steps = 20
[memory]
min_numel = 0
"""

JOB = """
import sys, time
from gyre_client import Loader
name, dataset, size, rank, ranks, step_s = sys.argv[1:]
order = dict(batch_size=int(size), seed=7, job=name, rank=int(rank), world_size=int(ranks))
with Loader(dataset, **order) as loader:
    while True:
        for batch in loader:
            time.sleep(float(step_s))
"""
JOBS = (
    ("vision-pretrain", "landscapes", 32, 2, 0.05),
    ("speech-asr", "speech", 8, 1, 0.4),
    ("chat-sft", "talks", 16, 2, 1.0),
)


@contextmanager
def running(
    *command: object, environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process, for as long as the block lasts."""
    with log.open("wb") as file:
        process = subprocess.Popen([*map(str, command)], env=environment, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def scene(folder: Path) -> Iterator[str]:
    """The daemon, its jobs and the page; the value is the page's address."""
    write_data(folder)
    (folder / "run").mkdir(mode=0o700)
    environment = {**os.environ, "GYRE_ADDRESS": f"unix:{folder}/run/gyre.sock"}
    with ExitStack() as stack:
        far, near = (stack.enter_context(object_server(folder)) for _ in range(2))
        far.follow(FIRST_BYTE)
        near.follow(NEAR)
        (folder / "gyre.toml").write_text(configuration(folder, far.url, near.url))
        (folder / "job.py").write_text(JOB)
        (folder / "train.toml").write_text(TRAIN)

        def start(name: str, *command: object) -> None:
            log = folder / f"{name}.log"
            stack.enter_context(running(sys.executable, *command, environment=environment, log=log))

        start("gyred", "-m", "gyre_daemon", "serve", "--config", folder / "gyre.toml")
        wait_for((folder / "run" / "gyre.sock").exists)
        for name, dataset, size, ranks, step_s in JOBS:
            for rank in range(ranks):
                start(f"{name}-{rank}", folder / "job.py", name, dataset, size, rank, ranks, step_s)
        out = folder / "runs" / "stories-3m"
        start(
            "train",
            "-m",
            "gyre_trainer",
            "run",
            folder / "train.toml",
            "--nproc",
            2,
            f"--set=run.out={out}",
        )
        wait_for((out / "status.json").exists)
        tokenizer = folder / "talks" / "tokens" / "tokenizer.json"
        start("page", "-m", "gyre_client", "page", "--run", out, "--tokenizer", tokenizer)
        log = folder / "page.log"
        wait_for(lambda: b"token=" in log.read_bytes())
        yield log.read_text().strip().splitlines()[-1]


def wait_for(is_so: Any, deadline_s: float = 180.0) -> None:
    """Waits until something is so."""
    end_s = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < end_s, "the scene does not start: see the logs in its folder"
        time.sleep(0.1)


def draw(address: str, out: Path, pause_s: float) -> None:
    """Takes the pictures, after the heat map and the losses have grown for a while."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1180, "height": 760}, device_scale_factor=1.25)
        page.set_default_timeout(120_000)
        page.goto(address, wait_until="commit")
        page.wait_for_selector(".job")
        time.sleep(pause_s)
        shots(page, out)
        browser.close()


def shots(page: Page, out: Path) -> None:
    """Takes one picture after the other."""

    def take(name: str, view: str, ready: str, *, full: bool = True, pause_s: float = 2.0) -> None:
        page.evaluate("view => { location.hash = view; }", view)
        page.wait_for_selector(ready)
        time.sleep(pause_s)
        page.screenshot(path=out / f"page-{name}.png", full_page=full)

    def job(name: str) -> str:
        return f"job=0/uid:{os.getuid()}/{name}"

    take("jobs", f"jobs?{job('vision-pretrain')}", ".strip button", pause_s=6)
    slow = page.locator(".strip button.slow")
    (slow if slow.count() else page.locator(".strip button")).last.click()
    page.wait_for_selector(".detail .card")
    page.locator(".job.open").screenshot(path=out / "page-why.png")
    take("samples", f"samples?{job('vision-pretrain')}&step=40", ".sample img")
    take("tokens", f"samples?{job('chat-sft')}&step=3&as=served", ".tokens", full=False)
    take("order", f"order?{job('vision-pretrain')}", "canvas.map", pause_s=3)
    take("cost", "cost?dataset=landscapes", "table")
    take("storage", "storage", ".cells i.h2, .cells i.h3")
    take("training", "training", ".uplot", pause_s=3)
    page.keyboard.press("t")
    take("dark", f"jobs?{job('speech-asr')}", ".strip button", full=False, pause_s=4)
    page.keyboard.press("t")
    page.set_viewport_size({"width": 360, "height": 740})
    take("narrow", "jobs?", ".job", full=False)


def make_smaller(path: Path) -> None:
    """Gives a picture 256 colours, which are enough for all but many photos."""
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    if "samples" not in path.name:
        small.save(path, optimize=True)


def main() -> None:
    """Draws the pictures, or shows the scene."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="go on until Enter")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--seconds", type=float, default=300, help="until the pictures (300)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-page-") as name, scene(Path(name)) as address:
        if arguments.keep:
            input(f"{address}\nEnter ends it. ")
        else:
            draw(address, arguments.out, arguments.seconds)
            for path in arguments.out.glob("page-*.png"):
                make_smaller(path)


if __name__ == "__main__":
    main()
