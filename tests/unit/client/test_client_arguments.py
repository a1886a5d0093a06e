import math
from typing import Any

import numpy as np
import pytest
from gyre_client.command.cli import main
from gyre_client.command.output import duration, facts, table
from gyre_client.display import size
from gyre_client.errors import InvalidRequest
from gyre_client.loader.loader import Loader
from gyre_client.transport.arguments import order, reader, whole
from gyre_protos.v1 import loader_pb2 as pb


def test_an_order() -> None:
    assert order(8, 4, 7, "drop") == pb.OrderSpec(
        mode=pb.ORDER_MODE_FULL, tail=pb.TAIL_DROP, seed=7, global_batch_size=8
    )


def test_an_order_in_blocks() -> None:
    assert order(8, 4, 7, "wrap", "block", 1 << 20, 256) == pb.OrderSpec(
        mode=pb.ORDER_MODE_BLOCK,
        tail=pb.TAIL_WRAP,
        seed=7,
        global_batch_size=8,
        io_block_bytes=1 << 20,
        window_blocks=256,
    )
    assert order(8, 1, 0, "wrap", "sequential").mode == pb.ORDER_MODE_SEQUENTIAL


@pytest.mark.parametrize(
    ("mode", "io_block_bytes", "window_blocks", "complaint"),
    [
        ("blocks", 0, 0, "order is 'blocks'; it can be 'full', 'block', 'sequential'"),
        (
            "full",
            4096,
            0,
            "io_block_bytes and window_blocks belong to order='block', not to 'full'",
        ),
        ("sequential", 0, 3, "not to 'sequential'"),
        ("block", -1, 0, "io_block_bytes is -1"),
        ("block", 0, 2**64, "window_blocks is 18446744073709551616"),
    ],
)
def test_invalid_blocks_are_refused(
    mode: str, io_block_bytes: int, window_blocks: int, complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        order(8, 1, 0, "wrap", mode, io_block_bytes, window_blocks)


@pytest.mark.parametrize(
    ("bucket", "complaint"),
    [
        ([], r"bucket is \[\]"),
        ({}, "bucket names no field"),
        ({"field": 3}, r"bucket\['field'\] is 3"),
        (
            {"field": "x", "window": 8},
            "bucket has no key 'window'; it has field and window_batches",
        ),
        ({"field": "x", "window_batches": 1}, r"bucket\['window_batches'\] is 1"),
        ({"field": "x", "window_batches": "8"}, r"bucket\['window_batches'\] is '8'"),
    ],
)
def test_invalid_buckets_are_refused(bucket: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        order(8, 1, 0, "drop", bucket=bucket)


@pytest.mark.parametrize(
    ("batch_size", "world_size", "seed", "tail", "complaint"),
    [
        (
            10,
            4,
            0,
            "wrap",
            "batch_size is the global batch size, over all ranks; 10 is not divisible",
        ),
        (0, 1, 0, "wrap", "batch_size is 0"),
        (-8, 1, 0, "wrap", "batch_size is -8"),
        (8, 0, 0, "wrap", "world_size is 0"),
        (8, 1, -1, "wrap", "seed is -1"),
        (8, 1, 2**64, "wrap", "seed is 18446744073709551616"),
        (8, 1, 0, "keep", "tail is 'keep'"),
    ],
)
def test_invalid_orders_are_refused(
    batch_size: int, world_size: int, seed: int, tail: str, complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        order(batch_size, world_size, seed, tail)
    assert isinstance(caught.value, ValueError)


def test_whole_numbers_of_any_kind() -> None:
    assert whole("n", np.int32(5), 0, 10) == 5
    for value in (2.0, "5", None, math.nan):
        with pytest.raises(InvalidRequest, match="whole number"):
            whole("n", value, 0, 10)


def test_readers_are_apart_unless_named_and_younger_ones_are_newer() -> None:
    first, second = reader(None, 0, 1), reader(None, 0, 1)
    assert first.job != second.job
    assert first.generation <= second.generation
    assert reader("train", 1, 2).job == "train"


@pytest.mark.parametrize(
    ("rank", "world_size", "complaint"),
    [
        (0, None, "go together"),
        (None, 2, "go together"),
        (2, 2, "rank is 2"),
        (-1, 2, "rank is -1"),
        (0, 0, "world_size is 0"),
    ],
)
def test_a_loader_refuses_a_rank_that_does_not_exist(
    rank: int | None, world_size: int | None, complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        Loader("d", batch_size=8, rank=rank, world_size=world_size, address="unix:/nowhere.sock")


@pytest.mark.parametrize(
    ("rank", "world_size"), [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
)
def test_one_of_several_ranks_without_a_process_group_is_refused(
    rank: str, world_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rank, "1")
    monkeypatch.setenv(world_size, "2")
    with pytest.raises(InvalidRequest, match="init_process_group"):
        Loader("d", batch_size=8, address="unix:/nowhere.sock")


def test_a_name_needs_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYRE_ADDRESS", raising=False)
    with pytest.raises(
        InvalidRequest,
        match="no address was given, and a private daemon knows no dataset by the name 'wiki'",
    ):
        Loader("wiki", batch_size=8)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["status", "--address", "nowhere"],
        ["describe", "wiki"],
        [
            "describe",
            "x.bin",
            "--format",
            "tokens",
            "--option",
            "when=1979-05-27",
            "--address",
            "unix:/nowhere.sock",
        ],
        [
            "plan",
            "d",
            "--step",
            "0",
            "--batch-size",
            "7",
            "--world-size",
            "2",
            "--address",
            "unix:/nowhere.sock",
        ],
        ["plan", "d", "--step", "-1", "--batch-size", "8", "--address", "unix:/nowhere.sock"],
        [
            "plan",
            "d",
            "--step",
            "0",
            "--batch-size",
            "8",
            "--rank",
            "1",
            "--address",
            "unix:/nowhere.sock",
        ],
        ["cat", "d", "--num", "0", "--address", "unix:/nowhere.sock"],
        ["plan", "d", "--batch-size", "8", "--address", "unix:/nowhere.sock"],
        [
            "plan",
            "d",
            "--batch-size",
            "8",
            "--cost",
            "--step",
            "3",
            "--address",
            "unix:/nowhere.sock",
        ],
        ["plan", "d", "--batch-size", "8", "--step", "3:3", "--address", "unix:/nowhere.sock"],
        ["plan", "d", "--batch-size", "8", "--step", "0:1001", "--address", "unix:/nowhere.sock"],
        [
            "plan",
            "d",
            "--batch-size",
            "8",
            "--step",
            "0",
            "--window",
            "9",
            "--address",
            "unix:/nowhere.sock",
        ],
        [
            "plan",
            "d",
            "--batch-size",
            "8",
            "--cost",
            "--epochs",
            "0",
            "--address",
            "unix:/nowhere.sock",
        ],
    ],
)
def test_invalid_commands_exit_with_2_and_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GYRE_ADDRESS", raising=False)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gyre: ")
    assert captured.err.count("\n") == 1


def test_the_parser_refuses_an_option_that_is_no_pair(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["describe", "x", "--format", "tokens", "--option", "dtype"])
    assert "'dtype' is not KEY=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "text"),
    [("--step", "1:x"), ("--step", "first"), ("--io-block", "1 Mb"), ("--cache", "-1B")],
)
def test_the_parser_refuses_text_for_a_number(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "x", "--batch-size", "8", f"{option}={text}"])
    assert repr(text) in capsys.readouterr().err


def test_a_daemon_that_is_not_there_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", "unix:/nowhere.sock"]) == 1
    assert capsys.readouterr().err.startswith("gyre: no daemon answers at unix:/nowhere.sock: ")


def test_tables_align_text_to_the_left_and_numbers_to_the_right() -> None:
    assert (
        table(("NAME", "STEPS"), [("a", 7), ("bcdef", 1000)])
        == "NAME   STEPS\na          7\nbcdef   1000"
    )
    assert facts([("pid", 7), ("state", "serving")]) == "pid    7\nstate  serving"


def test_sizes_and_durations_have_units() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 PiB",
    ]
    assert [duration(s) for s in (0.04, 59.9, 61, 3700)] == [
        "0.0 s",
        "59.9 s",
        "1 min 1 s",
        "1 h 1 min",
    ]
