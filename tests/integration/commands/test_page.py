"""`gyre page`: a real server before a real daemon, asked as a browser asks it, and by attackers."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from gyre_client import Loader
from gyre_client.command.cli import main

from tests.batches import SAMPLE_LENGTH, take
from tests.conftest import Daemon, StartDaemon

G = 4
SIZE = 64
CHAIN = [{"name": "crop_or_pad", "field": "text", "length": 5}]


@dataclass
class Opened:
    """A page, and a browser that has entered it."""

    entrance: str
    base: str
    browser: httpx.Client
    process: subprocess.Popen[str]

    def ask(self, name: str, **values: str | int) -> Any:
        answer = self.browser.get(f"{self.base}api/{name}", params=values)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def state(self, wanted: Callable[[dict[str, Any]], object] = lambda _: True) -> dict[str, Any]:
        """The first state for which `wanted` is true, as an event says it."""
        with self.browser.stream("GET", f"{self.base}events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if wanted(found):
                        return found
        raise AssertionError("the stream has ended")


def start_page(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "gyre_client", "page", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    return process, process.stdout.readline().strip()


def stop_page(process: "subprocess.Popen[str]") -> None:
    """Ends it as Ctrl-C does, although a browser still listens."""
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors


def enter(process: subprocess.Popen[str], address: str) -> Opened:
    browser = httpx.Client(timeout=120, trust_env=False)
    answer = browser.get(address)
    assert answer.status_code == 200, answer.text
    path = re.search(r"url=(/[^\"]+)", answer.text)
    assert path
    base = f"{address.partition('/?')[0]}{path[1]}"
    return Opened(address, base, browser, process)


@pytest.fixture
def open_page() -> Iterator[Callable[..., Opened]]:
    opened: list[Opened] = []

    def start(*arguments: str) -> Opened:
        opened.append(enter(*start_page(*arguments)))
        return opened[-1]

    yield start
    for each in opened:
        each.browser.close()
        stop_page(each.process)


@pytest.fixture
def served(gyred: StartDaemon, numbers_file: Path, tmp_path: Path) -> Daemon:
    (tmp_path / "texts.jsonl").write_text(
        "".join(
            json.dumps({"text": f"<img src=x onerror=alert({each})>"}) + "\n"
            for each in range(SIZE)
        )
    )
    numbers = {"uri": str(numbers_file), "format": "tokens", "dtype": "int16"}
    texts = {"uri": str(tmp_path / "texts.jsonl"), "columns": ["text"]}
    return gyred(
        {"datasets": {"numbers": {**numbers, "sequence_length": SAMPLE_LENGTH}, "texts": texts}}
    )


@pytest.fixture
def page(open_page: Callable[..., Opened], served: Daemon) -> Opened:
    return open_page("--daemon", served.address)


def test_only_the_browser_with_the_link_gets_in(page: Opened) -> None:
    origin = page.base[: page.base.index("/", 8)]
    (cookie,) = page.browser.cookies.jar
    assert cookie.value
    assert cookie.has_nonstandard_attr("HttpOnly")
    assert cookie.get_nonstandard_attr("SameSite", "").lower() == "strict"
    assert page.base.endswith(cookie.path), "other ports of this machine do not get it"
    with httpx.Client(timeout=60, trust_env=False) as other:
        for address in (
            page.entrance,  # the link was used
            f"{origin}/",
            f"{origin}/?token=",
            f"{origin}/?token={'x' * 43}",
            f"{origin}/?token=%C3%A9",
            page.base,
            f"{page.base}events",
            f"{page.base}static/page.js",
            f"{origin}/nothing",
        ):
            refused = other.get(address)
            assert refused.status_code == 403, address
            assert "set-cookie" not in refused.headers
        for wrong in ("", "x", cookie.value[:-1], f"{cookie.value}x"):
            refused = other.get(page.base, headers={"Cookie": f"gyre_page={wrong}"})
            assert refused.status_code == 403
        assert other.get(f"{origin}/favicon.ico").status_code == 204, "browsers ask by themselves"
    assert page.browser.get(page.base).status_code == 200


def test_pages_of_other_sites_get_nothing(page: Opened) -> None:
    port = page.base.split(":")[2].partition("/")[0]

    def status(**headers: str) -> int:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return page.browser.get(f"{page.base}api/datasets?daemon=0", headers=names).status_code

    assert status() == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "",
        "localhost.evil",
    ):
        assert status(Host=host) == 403, host  # a name that was rebound to 127.0.0.1
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost:9999", "127.0.0.1"):
        assert status(Host=host) == 200, host  # 9999: by `ssh -L`
    for origin in ("https://evil.example", f"http://127.0.0.1:{int(port) + 1}", "null"):
        assert status(Origin=origin) == 403, origin
    assert status(Origin=f"http://127.0.0.1:{port}") == 200
    for site in ("cross-site", "same-site"):
        assert status(Sec_Fetch_Site=site) == 403, site
    assert status(Sec_Fetch_Site="same-origin") == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert page.browser.request(method, f"{page.base}api/datasets").status_code == 405, method


def test_every_answer_has_the_policy_and_static_files_stay_in_their_folder(page: Opened) -> None:
    for path in (
        "",
        "static/page.js",
        "static/../server.py",
        "static/%2e%2e/server.py",
        "api/datasets",
        "nothing",
    ):
        answer = page.browser.get(page.base + path)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        if ".." in path or "%2e" in path or path == "nothing":
            assert answer.status_code == 404
    licence = page.browser.get(f"{page.base}static/uplot/LICENSE").text
    assert "Leon Sorokin" in licence


def test_a_job_its_samples_its_order_and_its_reads(page: Opened, served: Daemon) -> None:
    with Loader("texts", batch_size=G, seed=3, job="talks", address=served.address) as loader:
        batches = take(loader, 6)
        state = page.state(lambda found: found["jobs"])
        (job,) = state["jobs"]
        assert (job["job"], job["dataset"], job["num_ranks"]) == ("talks", "texts", 1)
        assert job["verdict"]["text"]
        assert state["daemons"][0]["users"][0]["user"] == f"uid:{os.getuid()}"
        assert state["daemons"][0]["reserved_bytes"] > 0
        found = page.ask("samples", job=job["key"], step=2, first=0, num=8)
        assert [row["sample_id"] for row in found["rows"]] == batches[2]["sample_id"].tolist()
        for row in found["rows"]:
            (field,) = row["fields"]
            assert field["text"] == f"<img src=x onerror=alert({row['sample_id']})>"
        assert found["sources"] == [{"name": "texts.jsonl", "count": G}]
        (first, *_) = found["places"]
        assert first["shard_row"] == batches[2]["sample_id"][0]
        later = page.ask("samples", job=job["key"], step=2, first=2, num=2)
        assert [row["row"] for row in later["rows"]] == [2, 3]
        resume = page.state(lambda found: found["jobs"][0]["step"] == 6)
        assert resume, "six steps were taken, however many were read ahead"
        order = page.ask("order", job=job["key"])
        assert order["resume"]["step"] == 6
        (place, *_) = order["resume"]["places"]
        assert place["sample_id"] == take(loader, 1)[0]["sample_id"][0]
        assert all(sum(column) == G for column in order["cells"])
        assert (order["order"]["seed"], order["order"]["batch_size"]) == ("3", G)
        reads = page.ask("reads", job=job["key"])
        assert all(read["total_s"] > 0 for read in reads)
        why = page.ask("why", job=job["key"], step=reads[-1]["first_step"])
        assert why[0]["job"] == "talks"
        status = page.state()
        assert [each["job"] for each in status["jobs"]] == ["talks"], (
            "samples for the page are no job"
        )
    gone = page.browser.get(
        f"{page.base}api/samples", params={"job": job["key"], "step": 1, "first": 0, "num": 1}
    )
    while gone.status_code == 200:  # until the next look at the daemon
        gone = page.browser.get(f"{page.base}api/order", params={"job": job["key"]})
    assert "ended" in gone.json()["error"]


def test_samples_are_shown_as_a_job_with_transforms_of_its_own_gets_them(
    page: Opened, served: Daemon
) -> None:
    with Loader(
        "texts", batch_size=G, transform=CHAIN, job="cut", address=served.address
    ) as loader:
        (batch,) = take(loader, 1)
        (job,) = page.state(lambda found: found["jobs"])["jobs"]
        stored, cut = (
            page.ask("samples", job=job["key"], step=0, first=0, num=G, **{"as": form})
            for form in ("stored", "served")
        )
    assert batch["text"].shape == (G, 5)
    assert [row["fields"][0]["type"] for row in cut["rows"]] == ["uint8 [5]"] * G
    assert [row["sample_id"] for row in cut["rows"]] == batch["sample_id"].tolist()
    assert all(row["fields"][0]["text"].startswith("<img src=x") for row in stored["rows"])


def test_costs_and_bad_questions(page: Opened) -> None:
    sliders = {"batch_size": 8, "epochs": 2, "io_block": 0, "window": 0, "cache": 0}
    found = page.ask("cost", daemon=0, dataset="numbers", **sliders)
    assert [each["order"] for each in found["estimates"]] == [
        "full",
        "block",
        "full with the cache",
    ]
    assert {each["name"] for each in page.ask("datasets", daemon=0)} == {"numbers", "texts"}
    for status, path in (
        (400, "api/cost?daemon=0&dataset=numbers&batch_size=0"),
        (404, "api/cost?daemon=0&dataset=none&batch_size=8&epochs=1&io_block=0&window=0&cache=0"),
        (400, "api/datasets?daemon=7"),
        (400, "api/datasets?daemon=" + "9" * 5000),
        (400, "api/samples?job=0/x/y&step=-1"),
        (400, "api/samples?job=0/x/y&step=" + "9" * 30),
        (400, "api/samples?run=0&step=1&first=0&num=1"),
        (400, "api/order?job=nothing"),
        (400, "api/run?run=0"),
    ):
        answer = page.browser.get(page.base + path)
        assert (answer.status_code, list(answer.json())) == (status, ["error"]), path


def test_many_questions_at_once_are_answered_or_refused(page: Opened) -> None:
    statuses: list[int] = []

    def ask() -> None:
        path = "api/cost?daemon=0&dataset=numbers&batch_size=8&epochs=9&io_block=0&window=0&cache=0"
        statuses.append(page.browser.get(page.base + path).status_code)

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 429}
    assert 200 in statuses


def test_daemons_stand_side_by_side_and_one_that_is_gone_is_named(
    open_page: Callable[..., Opened], gyred: StartDaemon, numbers_file: Path, tmp_path: Path
) -> None:
    dataset = {"uri": str(numbers_file), "format": "tokens", "dtype": "int16", "sequence_length": 8}
    daemons = [gyred({"datasets": {name: dataset}}) for name in ("one", "two")]
    arguments = [word for each in daemons for word in ("--daemon", each.address)]
    page = open_page(*arguments, "--daemon", f"unix:{tmp_path}/nowhere.sock")
    with (
        Loader("one", batch_size=2, job="a", address=daemons[0].address) as first,
        Loader("two", batch_size=2, job="b", address=daemons[1].address) as second,
    ):
        take(first, 1)
        take(second, 1)
        state = page.state(lambda found: len(found["jobs"]) == 2)
        assert [(job["daemon"], job["job"]) for job in state["jobs"]] == [(0, "a"), (1, "b")]
        assert "nowhere" in state["daemons"][2]["error"]
        daemons[1].stop()
        state = page.state(lambda found: found["daemons"][1]["error"])
        assert [job["job"] for job in state["jobs"]] == ["a"]


def test_a_run_shows_its_losses_and_the_samples_behind_them(
    open_page: Callable[..., Opened], served: Daemon, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with Loader("texts", batch_size=G, seed=8, job="run", address=served.address) as loader:
        batches = take(loader, 4)
        cursor = loader.state_dict()["cursor"]
    write_status(run, cursor, 3)
    losses = [2.0 + 0.01 * (step % 5) for step in range(40)]
    losses[30] = 7.0
    lines = [
        {"step": step, "loss": loss, "num_targets": 8, "elapsed_s": 0.1}
        for step, loss in enumerate(losses)
    ]
    (run / "history.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    page = open_page("--daemon", served.address, "--run", str(run))
    (shown,) = page.state(lambda found: found["runs"][0]["num_recorded"])["runs"]
    assert (shown["step"], shown["steps"], shown["state"]) == (3, 99, "running")
    assert shown["ranks"][1] == {
        "memory_bytes": 11.0,
        "step_s": 0.5,
        "hop_wait_s": 0.2,
        "data_wait_s": 0.1,
    }
    curve = page.ask("run", run=0)
    assert [each["step"] for each in curve["spikes"]] == [30]
    found = page.ask("samples", run=0, step=2, first=0, num=G)
    assert [row["sample_id"] for row in found["rows"]] == batches[2]["sample_id"].tolist()


def write_status(run: Path, cursor: bytes, step: int) -> None:
    """A status file as `gyre-train` writes it."""
    rank = {"step_s": 0.5, "data_wait_s": 0.1, "hop_wait_s": 0.2, "memory_bytes": 11}
    status = {
        "step": step,
        "steps": 99,
        "loss": 2.0,
        "tokens_per_s": 80.0,
        "written_at": time.time(),
        "dataset": "texts",
        "format": "",
        "cursor": base64.b64encode(cursor).decode(),
        "ranks": [rank, rank],
    }
    (run / "status.json").write_text(json.dumps(status))


def test_flags_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GYRE_ADDRESS", raising=False)
    for arguments, problem in (
        ([], "which daemon?"),
        (["--daemon", "nowhere"], "nowhere"),
        (["--daemon", "unix:/x.sock", "--port", "70000"], "--port is 70000"),
        (["--run", str(tmp_path / "none")], "no such folder"),
        (["--run", str(tmp_path), "--tokenizer", str(tmp_path)], "no file of a tokenizer"),
    ):
        assert main(["page", *arguments]) == 2
        assert problem in capsys.readouterr().err.splitlines()[-1]


def test_a_port_that_is_taken_is_named(page: Opened, served: Daemon) -> None:
    port = page.base.split(":")[2].partition("/")[0]
    arguments = [sys.executable, "-m", "gyre_client", "page", "--daemon", served.address]
    ended = subprocess.run(
        [*arguments, "--port", port], check=False, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"--port {port}" in ended.stderr.splitlines()[-1]
