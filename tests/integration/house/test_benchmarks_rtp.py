"""The benchmarks of rotation at toy size on a CPU: every row has plausible figures."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.training.gpt import GPTConfig

from benchmarks.rtp import adapters, gpu, models
from benchmarks.rtp.contenders import Contender, How
from benchmarks.rtp.floor import floor_bytes
from benchmarks.rtp.gpu import cross_entropy_table, slices_table
from benchmarks.rtp.host_cost import rows
from benchmarks.rtp.live import fake_step
from benchmarks.rtp.ranks import run_on_ranks
from benchmarks.rtp.resident import resident_peak_of_step
from benchmarks.rtp.speed import Took, measure, table
from benchmarks.rtp.workloads import NARROW, SMALL, TOY, Workload

CPU = torch.device("cpu")
BLOCK = GPTConfig(64, 1, 32, 4, 4, 64, 16, norm="layer")


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu, "_NUM_ROUNDS", 1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_slices_stand_beside_the_unsliced_block() -> None:
    heading, _, *rows = map(cells, slices_table(BLOCK, [32], (2, 4), CPU))
    assert [row[:2] for row in rows] == [["32", "2"], ["32", "4"]]
    assert all(len(row) == len(heading) for row in rows)
    assert all(float(row[2]) > 0 and float(row[3]) > 0 and row[4].endswith("%") for row in rows)
    assert not dist.is_initialized()


def test_the_rotated_head_stands_beside_chunks_and_all_logits() -> None:
    heading, _, *rows = map(cells, cross_entropy_table(16, 96, 32, 4, CPU))
    assert [row[0] for row in rows] == ["all logits", "chunked", "rotated, 4 ranks"]
    assert all(len(row) == len(heading) and float(row[2]) > 0 for row in rows)
    assert float(rows[1][2]) == 1


@pytest.mark.parametrize("how", [How.ALONE, How.FSDP2_SUB_BLOCK, How.GYRE, How.BY_SLICE])
@pytest.mark.parametrize(
    "workload", [TOY, SMALL.with_layers(2).with_tokens(32)], ids=["AdamW", "SGD, no vocabulary"]
)
def test_no_counted_peak_is_below_its_computed_floor(how: How, workload: Workload) -> None:
    for recompute, per_block in ((False, False), (True, False), (True, True)):
        contender = Contender(how, recompute, per_block=per_block)
        assert floor_bytes(contender, workload, 2) <= fake_step(contender, workload, 2).peak_bytes


def test_resident_memory_has_the_shards_and_gradients_of_a_step() -> None:
    wide = SMALL.with_layers(1).with_tokens(8)
    ranks = run_on_ranks(2, resident_peak_of_step, Contender(How.GYRE), wide, 1)
    for resident in ranks:  # the shards of an MLP, the buffer of half of one, and gradients
        assert 3 * 9 * 2**20 < resident.proportional <= resident.all_pages


def test_elapsed_time_stands_beside_cpu_time() -> None:
    found = measure(NARROW, 2, 2, recompute=False)
    hops = ["", ", its hops left out"]
    assert list(found) == [
        "DDP",
        "FSDP2 per layer",
        "FSDP2 per sub-block",
        *(f"Gyre, slice by slice{how}" for how in hops),
    ]
    for rounds in found.values():
        assert [len(ranks) for ranks in rounds] == [2, 2]
        assert all(min(took) > 0 for ranks in rounds for took in ranks)


def test_ratios_compare_the_slowest_rank_and_the_cpu_time_of_all() -> None:
    ddp, fsdp2 = (Took(0.5, 0.25, 0.125), Took(1, 0.75, 0.375)), (Took(2, 1, 1), Took(2, 1, 1))
    gyre = (Took(1.5, 1, 0.75), Took(1, 0.5, 0.25))
    rows = table({"DDP": [ddp] * 2, "FSDP2": [fsdp2] * 2, "Gyre": [gyre] * 2}).splitlines()
    assert cells(rows[-1]) == [
        "Gyre",
        "1500",
        "1500-1500",
        "1.50",
        "0.75",
        "750",
        "1.50",
        "500",
        "500",
    ]


def test_small_modules_are_replicated_by_default() -> None:
    found = [cells(row) for row in rows(2, 1)]
    assert [row[:2] for row in found] == [
        ["2", "FSDP2 per sub-block"],
        ["2", "Gyre, slice by slice"],
        ["2", "Gyre, slice by slice, its hops left out"],
        ["2", "Gyre"],
    ]
    assert all(float(row[2]) > 0 and float(row[3]) > 0 for row in found)
    assert [row[4] for row in found] == ["", "32", "32", ""]


def printed_rows(text: str) -> list[list[str]]:
    """The rows of all tables in what a script has printed, headings left out."""
    lines = [cells(line.strip()) if line.startswith("|") else [] for line in text.splitlines()]
    ruled = [at for at, row in enumerate(lines) if row and set("".join(row)) <= {"-", ":"}]
    headings = {each - 1 for each in ruled}
    found = [row for at, row in enumerate(lines) if row and at not in {*ruled, *headings}]
    assert {len(row) for row in found} <= {len(lines[at]) for at in headings}
    return found


def test_what_is_for_a_gpu_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--device", "cpu"])
    found = printed_rows(capsys.readouterr().out)
    assert [row[:2] for row in found[:4]] == [["32", "2"], ["32", "4"], ["64", "2"], ["64", "4"]]
    assert [row[0] for row in found[4:7]] == ["all logits", "chunked", "rotated, 4 ranks"]
    assert [row[:2] for row in found[7:]] == [["32", "2"], ["32", "4"]], "whole steps"


@pytest.mark.models
def test_families_have_a_row_each_on_the_device_that_is_asked_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    models.main(["--families", "Llama", models.LORA, "--rounds", "1", "--device", "cpu"])
    found = printed_rows(capfd.readouterr().out)
    assert [row[0] for row in found] == ["Llama", models.LORA]
    assert all(float(cell) > 0 for row in found for cell in row[1:])


@pytest.mark.models
def test_adapters_that_rotate_stand_beside_whole_ones(capfd: pytest.CaptureFixture[str]) -> None:
    adapters.main(["--ranks", "2", "--rounds", "1"])
    found = printed_rows(capfd.readouterr().out)
    assert [row[1] for row in found] == ["adapters replicated", "adapters rotated"]
    assert all(float(cell) > 0 for row in found for cell in row[2:])
