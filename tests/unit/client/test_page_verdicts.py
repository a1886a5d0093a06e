"""What the page says of jobs, losses, orders and latencies. No process."""

import base64
import io
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client.display import MediaBudget, Sample, Value, decoder
from gyre_client.errors import InvalidRequest
from gyre_client.page.training_run import Curve, TrainingRun
from gyre_client.page.watch import OWN_JOBS, LatencyMap, jobs_of, users_of
from gyre_client.page.web import _fields, cost_request, evenness
from gyre_protos.v1 import loader_pb2 as pb
from PIL import Image


def session(
    job: str = "job", rank: int = 0, user: str = "uid:1", **lately: float
) -> pb.SessionState:
    return pb.SessionState(
        handle="ab",
        user=user,
        dataset="web",
        reader=pb.Reader(job=job, rank=rank, world_size=2),
        resume_step=7 + rank,
        memory_bytes=100,
        window_batches=8,
        lately=pb.Lately(**{"elapsed_s": 10.0, "batches_per_s": 2.0, **lately}),
    )


@pytest.mark.parametrize(
    ("kind", "lately"),
    [
        ("trainer", {"trainer_waited_s": 0.2, "wait_trainer_s": 8.0}),
        ("storage", {"trainer_waited_s": 6.2, "wait_storage_s": 7.0, "wait_processor_s": 1.0}),
        ("processor", {"trainer_waited_s": 6.2, "wait_storage_s": 1.0, "wait_processor_s": 7.0}),
        ("client", {"trainer_waited_s": 6.2, "wait_trainer_s": 3.0}),
        ("idle", {"batches_per_s": 0.0, "wait_trainer_s": 10.0}),
        ("new", {"elapsed_s": 0.01}),
    ],
)
def test_a_job_has_one_verdict(kind: str, lately: dict[str, float]) -> None:
    ranks = [session("job", rank, "uid:1", **lately) for rank in range(2)]
    (job,) = jobs_of(0, ranks, {"web": "s3://bucket/web"})
    assert job["verdict"]["kind"] == kind
    assert (job["num_ranks"], job["step"]) == (2, 7)
    if kind == "storage":
        assert "62 %" in job["verdict"]["text"]
        assert "s3://bucket/web" in job["verdict"]["text"]
    assert sum(job["shares"].values()) <= 1.0


def test_jobs_of_one_name_and_two_users_are_two_and_samples_for_the_page_are_none() -> None:
    sessions = [session(), session(user="uid:2"), session(job=f"{OWN_JOBS}0")]
    assert [job["user"] for job in jobs_of(3, sessions, {})] == ["uid:1", "uid:2"]
    assert {job["key"] for job in jobs_of(3, sessions, {})} == {"3/uid:1/job", "3/uid:2/job"}
    users = {each["user"]: each["memory_bytes"] for each in users_of(sessions[:2])}
    assert users == {"uid:1": 100, "uid:2": 100}


def test_names_of_a_daemon_cannot_move_the_reader() -> None:
    (job,) = jobs_of(0, [session(job="a\x1b[2J\u202eb")], {})
    assert job["job"].isprintable()


def curve_of(losses: list[float]) -> Curve:
    curve = Curve()
    for step, loss in enumerate(losses):
        curve.add({"step": step, "loss": loss})
    return curve


def test_spikes_are_found_in_noise_that_falls() -> None:
    rng = random.Random(3)
    losses = [2 + 3 * math.exp(-step / 100) + rng.gauss(0, 0.05) for step in range(2000)]
    assert curve_of(losses).spikes == []
    for step in (300, 301, 1500):
        losses[step] += 1.5
    losses[900] = math.nan
    found = curve_of(losses).spikes
    assert [each.step for each in found if each.step != 301] == [300, 900, 1500]
    assert found[1].loss is None
    assert json.dumps(curve_of(losses).plain(), allow_nan=False)


def test_a_resume_takes_steps_and_spikes_back() -> None:
    curve = curve_of([2.0 + 0.01 * (step % 3) for step in range(100)] + [9.0])
    assert [each.step for each in curve.spikes] == [100]
    curve.add({"resumed_at": 90})
    assert (list(curve.steps)[-1], curve.spikes) == (89, [])


def test_a_long_curve_is_short_and_keeps_its_heights() -> None:
    losses = [1.0] * 100_000
    losses[77_777] = 5.0
    plain = curve_of(losses).plain()
    assert len(plain["step"]) <= 1600
    assert plain["loss"][plain["step"].index(77_777)] == 5.0


def test_a_run_without_or_with_damaged_files_is_shown(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such folder"):
        TrainingRun(0, tmp_path / "none")
    run = TrainingRun(0, tmp_path)
    for status in (None, "{", "[]", '{"step": 1}', '{"step": "x", "ranks": {}}'):
        if status is not None:
            (tmp_path / "status.json").write_text(status)
        (tmp_path / "history.jsonl").write_text(
            '{"step": 0, "loss": 1.0}\nnot json\n{"step": 1, "lo'
        )
        run.look()
        assert run.plain()["state"] == "no status file yet"
        assert run.curve()["step"] == [0]
    with pytest.raises(InvalidRequest):
        run.request(0)


def test_evenness_tells_a_shuffle_from_the_order_of_files() -> None:
    rng = random.Random(0)
    even = [[0] * 20 for _ in range(50)]
    for column in even:
        for _ in range(64):
            column[rng.randrange(20)] += 1
    alone = [[64 if band == column % 20 else 0 for band in range(20)] for column in range(50)]
    assert evenness(even) == pytest.approx(1.0, abs=0.02)
    assert evenness(alone) == pytest.approx(0.0, abs=0.01)
    assert evenness([[1, 0]]) is None


def test_sliders_are_bounded() -> None:
    good = {"batch_size": "256", "epochs": "3", "io_block": "0", "window": "0", "cache": "0"}
    assert cost_request("web", good).order.global_batch_size == 256
    for name, value in (
        ("batch_size", "0"),
        ("epochs", "-1"),
        ("window", "x"),
        ("cache", "9" * 30),
    ):
        with pytest.raises(InvalidRequest, match=name):
            cost_request("web", {**good, name: value})


def test_the_heat_map_has_means_of_each_column() -> None:
    latencies = LatencyMap()

    def look(num: int, sum_s: float, now_s: float) -> None:
        endpoint = pb.EndpointState(name="s3://b", num_answered=num, first_byte_s=sum_s)
        latencies.add(pb.DaemonStatus(endpoints=[endpoint]), now_s)

    look(100, 50.0, 0.0)  # before the page looked
    look(104, 50.2, 1.0)
    look(110, 50.6, 4.0)
    look(110, 50.6, 6.0)
    look(110, 50.6, 11.0)
    look(3, 0.1, 12.0)  # the daemon was started again
    look(5, 0.3, 16.0)
    (row,) = latencies.plain()["rows"]
    assert row["cells"] == [pytest.approx(0.06), None, pytest.approx(0.1)]


def fields_of(values: dict[str, Value], tokenizer: str | None = None) -> dict[str, dict[str, Any]]:
    shown = _fields(Sample(3, values), decoder(tokenizer), MediaBudget(1 << 20))
    return {each["name"]: each for each in shown}


def test_tokens_are_marked_where_they_count_for_the_loss() -> None:
    tokens, mask = np.array([104, 105, 33, 200, 10]), np.array([0, 1, 1, 0, 0], bool)
    values = {"tokens": Value("int32", [5], tokens), "loss_mask": Value("bool", [5], mask)}
    found = fields_of(values, "bytes")
    assert list(found) == ["tokens"]
    assert [(each["text"], each["counted"]) for each in found["tokens"]["spans"]] == [
        ("h", False),
        ("i!", True),
        ("\ufffd\n", False),
    ]
    assert found["tokens"]["num_counted"] == 2
    (span,) = fields_of({"tokens": Value("int32", [2], np.array([5, 6]))})["tokens"]["spans"]
    assert span == {"text": "5 6", "counted": None}
    for shape in ([], [5, 1]):  # no mask of the tokens
        values["loss_mask"] = Value("bool", shape, np.ones(shape, bool))
        found = fields_of(values)
        assert found["tokens"]["num_counted"] is None
        assert found["loss_mask"]["kind"] == "words"


def test_bytes_are_marked_as_tokens_where_no_tokenizer_is_given() -> None:
    mask = Value("uint8", [2], b"\x00\x01")
    found = fields_of({"text": Value("uint8", [2], b"hi"), "loss_mask": mask})
    assert [each["text"] for each in found["text"]["spans"]] == ["104", "105"]


def test_tensors_that_look_like_images_are_images() -> None:
    flat = np.array([[[x, y, 0] for x in range(10)] for y in range(12)], np.uint8)
    planes = np.array([[[x / 10 for x in range(10)] for _ in range(12)] for _ in range(3)])
    found = fields_of(
        {
            "last": Value("uint8", [12, 10, 3], flat),
            "first": Value("float32", [3, 12, 10], planes),
            "mel": Value("float32", [16, 9], np.ones((16, 1)) * np.arange(9)),
            "jpg": Value("uint8", [4], b"\xff\xd8\xff\xe0"),
            "text": Value("uint8", [9], b"<b>hi</b>"),
            "wide": Value("float32", [3, 4, 4], np.zeros((3, 4, 4))),
            "constant": Value("float32", [8, 8, 1], np.full((8, 8, 1), np.nan)),
            "extreme": Value(
                "float64", [8, 8, 1], np.array([1.7e308, -1.7e308] * 32).reshape(8, 8, 1)
            ),
            "huge": Value("uint8", [9 << 20], b"\x89PNG\r\n\x1a\n" + bytes(9 << 20)),
        }
    )
    kinds = {name: each["kind"] for name, each in found.items()}
    assert kinds == {
        "last": "image",
        "first": "image",
        "mel": "image",
        "jpg": "image",
        "text": "text",
        "wide": "words",
        "constant": "image",
        "extreme": "image",
        "huge": "words",
    }
    assert found["last"]["source"].startswith("data:image/png;base64,iVBOR")
    assert (pixels_of(found["last"]) == flat).all()
    first = (planes.transpose(1, 2, 0) * 255 / 0.9).round()
    assert (pixels_of(found["first"]) == first).all()
    assert not pixels_of(found["constant"]).any()


def pixels_of(field: dict[str, Any]) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(field["source"].split(",")[1]))))
