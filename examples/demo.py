"""Two jobs share one daemon; one of them is killed and resumes to the bit.

One `gyred` serves the sources of Python's standard library. `gyre-train` trains a small GPT on two
ranks. A second job, a loop in plain Python, counts pairs of bytes in an order of its own. The
training job is killed with SIGKILL and resumed. Every claim that the demo prints is checked.

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
KILL_AT_STEP = 60  # a checkpoint is due every 25 steps: the last ten steps are taken again
LOOK_AT_STEP = 80  # when the daemon is asked for its statistics: both jobs still run
MAX_FINAL_LOSS = 2.4  # nats per byte; a byte drawn at random costs 5.5
SEQUENCE = 256
PAIRS_BATCH = 64
PAIRS_STEP_S = 0.02  # the second job's "model"
SHARD_BYTES = 8 << 20


def main() -> int:
    """Run the demo; return 0 if every check holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, default=Path(".demo"))
    parser.add_argument("--count-pairs", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    workdir = arguments.workdir.resolve()
    if arguments.count_pairs:
        return count_pairs(arguments.count_pairs, workdir / "data")
    run = workdir / "run"
    shutil.rmtree(run, ignore_errors=True)
    settings = tomllib.loads(TRAIN_CONFIG.read_text())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("FAILED: the demo was told to end"))
    began_s = time.monotonic()

    data = make_dataset(workdir / "data")
    with daemon(workdir, data) as address, second_job(workdir, address) as pairs:
        say(f"job 1 trains on 2 ranks; SIGKILL at step {KILL_AT_STEP}")
        with training(run, address) as job:
            history = run / "history.jsonl"
            wait_until(lambda: num_lines(history) >= KILL_AT_STEP, job, "job 1 trains")
            kill(job)
        checkpoint = (run / "checkpoints/latest").read_text().strip()
        say(f"job 1 resumes from its last checkpoint, {checkpoint}")
        with training(run, address, "--resume") as job:
            wait_until(lambda: num_lines(history) > LOOK_AT_STEP, job, "job 1 trains on")
            say("both jobs in `gyre top`")
            print(command("gyre", "top", "--once", "--address", address))
            check(job.wait() == 0, "job 1 reached its end")
        say("job 1, checked from outside")
        check_history(history, settings, address)
        loss = json.loads((run / "report.json").read_text())["final_loss"]
        check(loss < MAX_FINAL_LOSS, f"final loss {loss:.3f} nats per byte, below {MAX_FINAL_LOSS}")
        say("job 2, undisturbed meanwhile")
        check_pairs(pairs)
    print(f"\nall of it true, in {time.monotonic() - began_s:.0f} s")
    print(f"loss curve   {run}/loss.png\nreport       {run}/report.json")
    return 0


def make_dataset(folder: Path) -> Path:
    """Write the interpreter's library as flat files of bytes, in the order of its paths; once.

    Windows overlap by one byte, so each file ends with the byte that the next one starts with. The
    number of windows is a multiple of `PAIRS_BATCH`, so that an epoch of job 2 ends with a batch.
    """
    if folder.exists():
        return folder
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    tokens = b"\n".join(path.read_bytes() for path in sources)
    usable = (len(tokens) - 1) // (SEQUENCE * PAIRS_BATCH) * SEQUENCE * PAIRS_BATCH
    unfinished = folder.with_suffix(".writing")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for index, start in enumerate(range(0, usable, SHARD_BYTES)):
        shard = tokens[start : min(start + SHARD_BYTES, usable) + 1]
        (unfinished / f"stdlib-{index:03}.bin").write_bytes(shard)
    unfinished.rename(folder)
    say(f"made a dataset of {usable / 1e6:.0f} MB from {len(sources)} source files")
    return folder


@contextmanager
def daemon(workdir: Path, data: Path) -> Iterator[str]:
    """Serve the dataset as `stdlib` with a `gyred`; the context's value is its address."""
    socket = workdir / "gyre.sock"
    (workdir / "gyre.toml").write_text(f"""
listen = ["unix:{socket}"]
memory_budget = "256MiB"

[datasets.stdlib]
uri = "{data}"
format = "tokens"
dtype = "uint8"
sequence_length = {SEQUENCE + 1}  # {SEQUENCE} inputs, and the byte after the last one
stride = {SEQUENCE}
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
    """Run job 1, a process group of its own: a launcher and its ranks.

    It is killed if the demo ends before it.
    """
    overrides = [f"--set=run.out={run}", f"--set=data.address={address}"]
    words = [str(BIN / "gyre-train"), "run", str(TRAIN_CONFIG), "--nproc", "2"]
    job = subprocess.Popen([*words, *overrides, *flags], start_new_session=True)
    try:
        yield job
    finally:
        if job.poll() is None:
            kill(job)


def kill(job: "subprocess.Popen[bytes]") -> None:
    """Send SIGKILL to all processes of the job at once."""
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()


@contextmanager
def second_job(workdir: Path, address: str) -> Iterator["subprocess.Popen[str]"]:
    """Run job 2 on one core's spare time, until the context ends."""
    say("job 2 counts pairs of bytes, in its own order")
    words = [sys.executable, __file__, "--workdir", str(workdir), "--count-pairs", address]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        yield job
    finally:
        if job.poll() is None:
            job.kill()
        job.wait()


def count_pairs(address: str, data: Path) -> int:
    """Count the pairs of each epoch and compare them with the files; job 2's whole program.

    After SIGTERM it prints how many epochs were whole, and how many of these were exact.
    """
    # The demo itself runs on the standard library.
    import numpy as np  # noqa: PLC0415
    from gyre_client import Loader  # noqa: PLC0415

    def pairs(windows: Any) -> Any:
        numbers = windows[..., :-1].astype(np.int64) * 256 + windows[..., 1:]
        return np.bincount(numbers.ravel(), minlength=1 << 16)

    told_to_end = []
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.append(True))
    shards = (np.fromfile(path, np.uint8) for path in sorted(data.glob("*.bin")))
    expected, counts = sum(pairs(shard) for shard in shards), []
    options: dict[str, Any] = {
        "batch_size": PAIRS_BATCH,
        "seed": 7,
        "job": "pairs",
        "token_dtype": "stored",
    }
    with Loader("stdlib", address=address, **options) as loader:
        while not told_to_end:
            total = np.zeros(1 << 16, np.int64)
            for batch in loader:
                total += pairs(batch["tokens"].numpy())
                time.sleep(PAIRS_STEP_S)
                if told_to_end:
                    break
            else:
                counts.append(bool((total == expected).all()))
    print(json.dumps({"epochs": len(counts), "exact": sum(counts)}))
    return 0


def check_pairs(job: "subprocess.Popen[str]") -> None:
    """End job 2 and check its counts."""
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=30)
    check(job.returncode == 0, "job 2 ended with status 0")
    counted = json.loads(output)
    check(
        counted["epochs"] > 0 and counted["exact"] == counted["epochs"],
        f"each of its {counted['epochs']} epochs had every byte pair of the files, once",
    )


def check_history(path: Path, settings: dict[str, Any], address: str) -> None:
    """Compare the committed history with the plan, and repeated steps to the bit."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    cut = next(index for index, entry in enumerate(entries) if "resumed_at" in entry)
    resumed_at = entries[cut]["resumed_at"]
    before = {entry["step"]: entry for entry in entries[:cut]}
    after = {entry["step"]: entry for entry in entries[cut + 1 :]}
    committed = [entry for entry in before.values() if entry["step"] < resumed_at]
    committed += after.values()
    num_steps, batch_size = settings["run"]["steps"], settings["data"]["batch_size"]
    check(
        [entry["step"] for entry in committed] == list(range(num_steps)),
        f"its history has each of {num_steps} steps once",
    )

    planned = planned_ids(0, num_steps * batch_size, settings, address)
    batches = [planned[step * batch_size : (step + 1) * batch_size] for step in range(num_steps)]
    check(
        [entry["sample_ids"] for entry in committed] == [digest(batch) for batch in batches],
        f"each step had the samples that `gyre plan` names: {len(planned)} samples, "
        f"{len(set(planned))} of them distinct",
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
    """Ask the daemon for the sample ids of a step; one step of n times `batch_size` is n steps."""
    numbers = {"batch-size": batch_size, "seed": settings["data"]["seed"], "step": step}
    flags = [f"--{name}={number}" for name, number in numbers.items()]
    dataset = settings["data"]["dataset"]
    plan = json.loads(command("gyre", "plan", dataset, "--address", address, "--json", *flags))
    return [int(sample_id) for sample_id in plan["sample_ids"]]


def digest(sample_ids: list[int]) -> str:
    """Digest a batch's sample ids as the history does."""
    lines = "".join(f"{sample_id}\n" for sample_id in sample_ids)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def num_lines(path: Path) -> int:
    """Count the lines written so far."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def command(*words: str) -> str:
    """Run a command and return its output."""
    done = subprocess.run(
        [BIN / words[0], *words[1:]], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    return done.stdout.rstrip()


def wait_until(is_true: Callable[[], bool], process: "subprocess.Popen[Any]", what: str) -> None:
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
