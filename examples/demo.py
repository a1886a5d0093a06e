"""Serve a dataset, train on it with two ranks, kill the job, and resume it exactly.

The demo uses the three commands of an installed Gyre, `gyred`, `gyre` and `gyre-train`, and the
standard library, whose sources are the training data. All that it writes is in one folder. It fails
unless every claim that it prints holds.

    python examples/demo.py [--workdir .demo]
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BIN = Path(sysconfig.get_path("scripts"))
TRAIN_CONFIG = Path(__file__).with_name("stdlib.toml")
KILL_AT_STEP = 60  # some steps after a checkpoint: their work is lost, and done again
MAX_FINAL_LOSS = 2.4  # nats per byte; a byte drawn at random costs 5.5
SHARD_BYTES = 8 << 20


def main() -> int:
    """Run the demo; return 0 if every check holds."""
    parser = argparse.ArgumentParser(
        description="Train, kill, resume, and check what was consumed."
    )
    parser.add_argument("--workdir", type=Path, default=Path(".demo"))
    workdir = parser.parse_args().workdir.resolve()
    run = workdir / "run"
    shutil.rmtree(run, ignore_errors=True)
    settings = tomllib.loads(TRAIN_CONFIG.read_text())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("FAILED: the demo was told to end"))
    began_s = time.monotonic()

    data = make_dataset(workdir / "data")
    with daemon(workdir, data) as address:
        say(f"training on 2 ranks; at step {KILL_AT_STEP} the job is killed with SIGKILL")
        with training(run, address) as job:
            wait_until(
                lambda: num_lines(run / "history.jsonl") >= KILL_AT_STEP, job, "the job trains"
            )
            kill(job)
        say(
            f"resuming from the last checkpoint, {(run / 'checkpoints/latest').read_text().strip()}"
        )
        with training(run, address, "--resume") as job:
            check(job.wait() == 0, "the resumed job reached its end")
        say("looking at what was consumed")
        check_history(run / "history.jsonl", settings, address)
        report = json.loads((run / "report.json").read_text())
        loss = report["final_loss"]
        check(loss < MAX_FINAL_LOSS, f"final loss {loss:.3f} nats per byte, below {MAX_FINAL_LOSS}")
        say("the daemon's statistics")
        print(command("gyre", "status", "--address", address))
    print(f"\nall of it true, in {time.monotonic() - began_s:.0f} s")
    print(
        f"loss curve   {run}/loss.png\nreport       {run}/report.json\ntensorboard  --logdir "
        f"{run}/tensorboard"
    )
    return 0


def make_dataset(folder: Path) -> Path:
    """Write the interpreter's library as flat files of bytes, in the order of its paths; once."""
    if folder.exists():
        return folder
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    tokens = b"\n".join(path.read_bytes() for path in sources)
    unfinished = folder.with_suffix(".writing")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for index, start in enumerate(range(0, len(tokens), SHARD_BYTES)):
        (unfinished / f"stdlib-{index:03}.bin").write_bytes(tokens[start : start + SHARD_BYTES])
    unfinished.rename(folder)
    say(f"made a dataset of {len(tokens) / 1e6:.0f} MB of {len(sources)} source files")
    return folder


@contextmanager
def daemon(workdir: Path, data: Path) -> Iterator[str]:
    """A context with a `gyred` that serves the dataset as `stdlib`; its value is the address."""
    socket = workdir / "gyre.sock"
    (workdir / "gyre.toml").write_text(f"""
listen = ["unix:{socket}"]
memory_budget = "256MiB"

[datasets.stdlib]
uri = "{data}"
format = "tokens"
dtype = "uint8"
sequence_length = 257  # 256 inputs, and the byte after the last one
stride = 256
""")
    with (workdir / "gyred.log").open("wb") as log:
        process = subprocess.Popen(
            [BIN / "gyred", "serve", "--config", workdir / "gyre.toml"], stderr=log
        )
    try:
        wait_until(
            lambda: '"ready"' in (workdir / "gyred.log").read_text(),
            process,
            f"gyred starts; see {workdir}/gyred.log",
        )
        say(f"gyred serves {data} at unix:{socket}")
        yield f"unix:{socket}"
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=30)
    check(status == 0, "gyred drained and ended with status 0")


@contextmanager
def training(run: Path, address: str, *flags: str) -> Iterator["subprocess.Popen[bytes]"]:
    """The training job, a process group of its own: a launcher and its ranks.

    It is killed if the demo ends before it.
    """
    overrides = [f"--set=run.out={run}", f"--set=data.address={address}"]
    command = [str(BIN / "gyre-train"), "run", str(TRAIN_CONFIG), "--nproc", "2"]
    job = subprocess.Popen([*command, *overrides, *flags], start_new_session=True)
    try:
        yield job
    finally:
        if job.poll() is None:
            kill(job)


def kill(job: "subprocess.Popen[bytes]") -> None:
    """SIGKILL to all processes of the job at once."""
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def check_history(path: Path, settings: dict[str, Any], address: str) -> None:
    """Check the committed history against an uninterrupted run, and repeated steps to the bit."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    cut = next(index for index, entry in enumerate(entries) if "resumed_at" in entry)
    resumed_at = entries[cut]["resumed_at"]
    before = {entry["step"]: entry for entry in entries[:cut]}
    after = {entry["step"]: entry for entry in entries[cut + 1 :]}
    committed = [entry for entry in before.values() if entry["step"] < resumed_at] + list(
        after.values()
    )
    num_steps, batch_size = settings["run"]["steps"], settings["data"]["batch_size"]
    check(
        [entry["step"] for entry in committed] == list(range(num_steps)),
        f"the committed history has each of {num_steps} steps once",
    )

    planned = planned_ids(0, num_steps * batch_size, settings, address)
    batches = [planned[step * batch_size : (step + 1) * batch_size] for step in range(num_steps)]
    check(
        [entry["sample_ids"] for entry in committed] == [digest(batch) for batch in batches],
        f"each step consumed the samples that `gyre plan` names: {len(planned)} samples, "
        f"{len(set(planned))} of them distinct",
    )
    for step in (0, resumed_at - 1, resumed_at, num_steps - 1):
        check(
            planned_ids(step, batch_size, settings, address) == batches[step],
            f"`gyre plan --step {step}` says so by itself",
        )

    repeated = sorted(before.keys() & after.keys())
    same = all(
        before[step][key] == after[step][key] for step in repeated for key in ("loss", "sample_ids")
    )
    check(
        bool(repeated) and same,
        f"the {len(repeated)} steps lost with the kill were taken again with the same samples "
        "and losses, to the bit",
    )


def planned_ids(step: int, batch_size: int, settings: dict[str, Any], address: str) -> list[int]:
    """The sample ids of a step.

    A step of `batch_size` n is n positions of the order, so that step 0 of many is many steps.
    """
    size, seed = str(batch_size), str(settings["data"]["seed"])
    flags = (
        "--address",
        address,
        "--batch-size",
        size,
        "--seed",
        seed,
        "--step",
        str(step),
        "--json",
    )
    plan = json.loads(command("gyre", "plan", settings["data"]["dataset"], *flags))
    return [int(sample_id) for sample_id in plan["sample_ids"]]


def digest(sample_ids: list[int]) -> str:
    """The digest of a batch's sample ids, as in the history."""
    return hashlib.sha256(
        "".join(f"{sample_id}\n" for sample_id in sample_ids).encode()
    ).hexdigest()[:16]


def num_lines(path: Path) -> int:
    """Lines written so far."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def command(*words: str) -> str:
    """Run a command and return its output."""
    done = subprocess.run(
        [BIN / words[0], *words[1:]], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    return done.stdout.rstrip()


def wait_until(is_true: Callable[[], bool], process: "subprocess.Popen[bytes]", what: str) -> None:
    """Wait until a condition is true; fail if the process that it depends on ends first."""
    while not is_true():
        if process.poll() is not None:
            sys.exit(f"FAILED: {what}")
        time.sleep(0.05)


def say(text: str) -> None:
    """Print a heading."""
    print(f"\n== {text}", flush=True)


def check(holds: bool, claim: str) -> None:
    """Print a claim that holds; end the demo if it does not."""
    if not holds:
        sys.exit(f"FAILED: {claim}")
    print(f"   ok: {claim}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
