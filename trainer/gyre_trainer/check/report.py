"""The rows of `gyre-train check`: the ranks of each, its bounds, and the table."""

import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.step_cost import dry_run
from gyre_trainer.check import programs
from gyre_trainer.errors import ConfigError
from gyre_trainer.rotation.rule import Recompute

Status = Literal["ok", "failed", "not run"]

_MAX_PEAK_ERROR = 0.05
# Of bfloat16: 2^-9 of a rounding, through two products.
_MAX_ROUNDING = 1e-2
_MAX_GROWTH = 1.5  # of the error, from 2 ranks to 8
_HOP_TIMEOUT_S = 30.0
_PROGRAM_TIMEOUT_S = 600.0  # a hop has its own; this one must be enough for a busy machine
_MODES: tuple[Recompute, ...] = ("none", "block", "layer")


@dataclass
class Row:
    """One row of the table.

    Attributes:
        number: as in the pages.
        does: its subject.
        status: whether all of it held.
        figures: by name.
        notes: failures, omissions with their reason, and advice.
        took_s: seconds.
    """

    number: int
    does: str
    status: Status = "ok"
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    took_s: float = 0.0

    def require(self, holds: bool, problem: str) -> None:
        """Note a problem unless something holds."""
        if not holds:
            self.status = "failed"
            self.notes.append(problem)

    def require_small(
        self, distances: dict[str, float], most: float, figure: str = "largest distance"
    ) -> None:
        """Require that all distances are at most ``most``, and note the largest one."""
        self.figures[figure] = max(distances.values())
        for name, distance in distances.items():
            self.require(distance <= most, f"{name}: {distance:.1e} is more than {most:.0e}")


class ProgramFailed(RuntimeError):
    """A rank raised, ended, or did not answer in time."""


@dataclass(frozen=True)
class Checker:
    """A check of one kind of device.

    Attributes:
        device_type: "cpu" or "cuda".
        quick: a few cases of each row, for a look of seconds.
    """

    device_type: str
    quick: bool = False

    @property
    def is_cuda(self) -> bool:
        """Whether it is of CUDA devices."""
        return self.device_type == "cuda"

    @property
    def cases(self) -> list[str]:
        """The models to train."""
        if self.quick:
            return list(programs.QUICK_CASES)
        has_library = all(find_spec(name) for name in ("transformers", "peft"))
        return [
            each for each in programs.CASES if has_library or each not in programs.LIBRARY_CASES
        ]

    def rows(self, numbers: Sequence[int]) -> Iterator[Row]:
        """Yield each row when it is done."""
        for number, (does, act) in enumerate(_ROWS, 1):
            if number not in numbers:
                continue
            row, began_s = Row(number, does), time.monotonic()
            try:
                act(self, row)
            except (ProgramFailed, RuntimeError, ValueError, OSError) as error:
                row.require(False, " ".join(str(error).split())[-600:])
            row.took_s = time.monotonic() - began_s
            yield row

    def run(
        self,
        num_ranks: int,
        program: Callable[..., Any],
        *args: Any,
        nccl: bool = False,
        dying: bool = False,
        late: str = "",
    ) -> list[Any]:
        """The result of ``program(device, *args)`` on each rank of a new process group.

        Args:
            num_ranks: of processes; without ``nccl`` all of one device.
            program: a function of `programs`.
            args: its arguments.
            nccl: whether each rank has its own device.
            dying: whether ranks may end; their result is None then.
            late: as `programs.hops_by` has it.

        Raises:
            ProgramFailed: a rank raised or ended, or was too late.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([programs.__name__])
        with tempfile.TemporaryDirectory() as folder:
            pipes, processes = [], []
            for rank in range(num_ranks):
                here, there = context.Pipe(duplex=False)
                job = _Job(rank, num_ranks, f"{folder}/store", self.is_cuda, nccl, late)
                process = context.Process(
                    target=_serve, args=(there, job, program, args), daemon=True
                )
                process.start()
                there.close()
                pipes.append(here)
                processes.append(process)
            try:
                return _answers(pipes, dying=dying)
            finally:
                for process in processes:
                    process.kill()
                    process.join()


@dataclass(frozen=True)
class _Job:
    """The place of a process among the ranks."""

    rank: int
    num_ranks: int
    store: str
    is_cuda: bool
    nccl: bool
    late: str


def _serve(pipe: Connection, job: _Job, program: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Be a rank: join the group, run the program, send (succeeded, result or error)."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device, backend = torch.device("cpu"), "gloo"
    if job.is_cuda:
        device = torch.device("cuda", job.rank if job.nccl else 0)
        backend = f"cpu:gloo,cuda:{'nccl' if job.nccl else 'gloo'}"
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{job.store}",
            rank=job.rank,
            world_size=job.num_ranks,
            timeout=timedelta(seconds=_HOP_TIMEOUT_S),
            device_id=device if job.nccl else None,
        )
        with programs.hops_by(device, staged=job.is_cuda and not job.nccl, late=job.late):
            pipe.send((True, program(device, *args)))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
    pipe.close()
    os._exit(0)  # a destructor of a group could wait for dead ranks


def _answers(pipes: Sequence[Connection], *, dying: bool) -> list[Any]:
    found: dict[int, Any] = {}
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline_s = time.monotonic() + _PROGRAM_TIMEOUT_S
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise ProgramFailed(f"ranks {sorted(waiting.values())} did not answer in time")
        for pipe in [each for each in waiting if each in ready]:
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pipe.recv()
            except EOFError:
                succeeded, value = dying, None if dying else "its process ended"
            if not succeeded and not dying:
                raise ProgramFailed(f"rank {rank} of {len(pipes)}: {value}")
            found[rank] = value if succeeded else None
    return [found[rank] for rank in sorted(found)]


def _worst(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest value of each name."""
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def _versions(check: Checker, row: Row) -> None:
    row.figures |= {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("gyre-ml", "transformers", "peft"):
        try:
            row.figures[package] = version(package)
        except PackageNotFoundError:
            row.figures[package] = "not installed"
    row.figures["cores"] = len(os.sched_getaffinity(0))
    row.figures["memory, GiB"] = round(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
    )
    if not check.is_cuda:
        row.notes.append("no device of CUDA was asked for")
        return
    row.figures["cuda"] = torch.version.cuda
    row.figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    count = torch.cuda.device_count()
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        row.figures[f"device {index}"] = (
            f"{torch.cuda.get_device_name(index)}, {free >> 30} of {total >> 30} GiB free"
        )
    row.figures["peer access"] = [
        f"{one}-{other}"
        for one in range(count)
        for other in range(count)
        if one != other and torch.cuda.can_device_access_peer(one, other)
    ]


def _kernels(check: Checker, row: Row) -> None:
    (found,) = check.run(1, programs.ranks_against_one, check.cases, ("none",), "cpu")
    row.figures |= {"cases": len(found)}
    row.require_small(found, programs.EXACT)


def _parity(check: Checker, row: Row) -> None:
    sizes = (2,) if check.quick else (2, 3)
    modes = _MODES[:2] if check.quick else _MODES
    _compare(check, row, sizes, modes, nccl=False)


def _compare(
    check: Checker, row: Row, sizes: Sequence[int], modes: Sequence[str], *, nccl: bool
) -> None:
    found: dict[str, float] = {}
    for size in sizes:
        ranks = check.run(size, programs.ranks_against_one, check.cases, modes, nccl=nccl)
        found |= {f"{size} ranks, {name}": value for name, value in _worst(ranks).items()}
    row.figures["cases"] = row.figures.get("cases", 0) + len(found)
    row.require_small(found, programs.EXACT)
    left_out = [each for each in programs.CASES if each not in check.cases]
    if left_out:
        row.notes.append(f"left out: {', '.join(left_out)}")


def _sums(check: Checker, row: Row) -> None:
    sizes = (2, 4) if check.quick else (2, 8)
    few, many = (_worst(check.run(size, programs.rounding)) for size in sizes)
    for name, error in few.items():
        row.figures[f"bfloat16, {name}, {sizes[0]} ranks"] = error
        row.figures[f"bfloat16, {name}, {sizes[1]} ranks"] = many[name]
        most = min(_MAX_ROUNDING, _MAX_GROWTH * error)
        row.require(many[name] <= most, f"{name}: the error grows with the number of ranks")
    cases = check.cases[:1] if check.quick else check.cases
    for late in ("arrivals", "computations"):
        found = _worst(check.run(3, programs.ranks_against_one, cases, ("block",), late=late))
        of_case = {f"{name}, late {late}": distance for name, distance in found.items()}
        row.require_small(of_case, programs.EXACT, f"poison, late {late}")


def _dropout(check: Checker, row: Row) -> None:
    for rank, found in enumerate(check.run(2, programs.masks)):
        row.figures |= {
            name: holds and row.figures.get(name, True) for name, holds in found.items()
        }
        for name, holds in found.items():
            row.require(holds, f"rank {rank}: not so: {name}")


def _real_ring(check: Checker, row: Row) -> None:
    num_devices = torch.cuda.device_count() if check.is_cuda else 0
    if check.is_cuda:
        (said,) = check.run(1, programs.nccl_with_itself, nccl=True)
        row.require(said == "ok", f"NCCL with itself: {said}")
    if num_devices >= 2:
        _compare(check, row, (min(num_devices, 4),), _MODES, nccl=True)
    elif check.is_cuda:
        row.notes.append("a ring of NCCL: not run, as there is one device")
        return
    else:
        row.notes.append("NCCL: not run on a CPU; the rest by gloo")
    size, nccl = (num_devices, True) if num_devices else (3, False)
    (figures, *_) = check.run(size, programs.hop_figures, nccl=nccl)
    row.figures["GB/s of a hop"] = round(figures["bytes_per_s"] / 1e9, 2)
    told = check.run(size, programs.another_module, nccl=nccl, dying=nccl)
    row.figures["another module on one rank"] = told[0] or "a watchdog ended the rank"
    for text in told:
        row.require(nccl or "calls" in text, f"another module on one rank: {text or 'no error'}")
    began_s = time.monotonic()
    *told, _ = check.run(size, programs.killed, nccl=nccl, dying=True)
    row.figures["a killed rank, s"] = round(time.monotonic() - began_s, 1)
    for text in told:
        row.require(nccl or bool(text), "a killed rank: another rank went on")
    row.figures["a killed rank"] = told[0] or "a watchdog ended the rank"


def _cost(check: Checker, row: Row) -> None:
    size = 2
    hops = check.run(size, programs.hop_figures)[0]
    found = check.run(size, programs.step_figures)[0]
    exposed = max(0.0, 1 - found["s without hops"] / found["s"])
    planned = dry_run(programs.step_config(size), Strategy.GYRE, size).peak_bytes
    error = found["peak"] / planned - 1
    row.figures |= {
        "us a hop": round(hops["us"]),
        "us to start one": round(hops["us to start"]),
        "ms a step": round(1e3 * found["s"], 1),
        "exposed hops": f"{exposed:.0%}",
        "host idle": f"{max(0.0, 1 - found['busy']):.0%}",
        "peak to plan": f"{error:+.1%}",
    }
    row.require(
        abs(error) <= _MAX_PEAK_ERROR,
        f"a step's peak is {found['peak'] / 2**20:.1f} MiB, and {planned / 2**20:.1f} were planned",
    )
    if not check.is_cuda:
        row.notes.append("calls that wait for a device: not run on a CPU")
    else:
        (said,) = check.run(1, programs.synchronous_calls)
        row.figures["waits for the device"] = said
        row.require(said == "nothing", f"a dense step waits for the device: {said}")
    if exposed > 0.1:
        row.notes.append(
            f"{exposed:.0%} of this small step are hops that nothing hides; more tokens on a rank "
            "hide them (t > 6F/4B, see the page on rotating a model)"
        )


def _resume(check: Checker, row: Row) -> None:
    if not all(find_spec(name) for name in ("transformers", "peft")):
        row.status = "not run"
        row.notes.append('adapters need transformers and peft: pip install "gyre-ml[transformers]"')
        return
    with tempfile.TemporaryDirectory() as root:

        def run(name: str, killed_in: str = "") -> list[Any]:
            args = str(Path(root) / name), killed_in
            return check.run(2, programs.lora_run, *args, dying=bool(killed_in))

        expected = run("whole")
        row.figures["bits"] = expected[0]
        for within in ("save",) if check.quick else ("step", "save"):
            told = run(within, within)
            row.require(told == [None, None], f"a rank killed in a {within}: another went on")
            row.require(run(within) == expected, f"killed in a {within}, resumed: other bits")


_ROWS: Sequence[tuple[str, Callable[[Checker, Row], None]]] = (
    ("versions, devices, memory", _versions),
    ("one rank on the device against the CPU, float64", _kernels),
    ("2 and 3 ranks on one device against one process", _parity),
    ("sums in bfloat16; poisoned buffers, late hops", _sums),
    ("dropout: masks, seeds", _dropout),
    ("the real ring; failures end in time", _real_ring),
    ("host, hops, and peak against the plan", _cost),
    ("LoRA killed and resumed: equal bits", _resume),
)
NUM_ROWS = len(_ROWS)


def require_device(device_type: str) -> None:
    """Refuse a missing device.

    Raises:
        ConfigError: CUDA is not available.
    """
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch sees no CUDA device here. Take --device cpu, or install a build "
            "of torch with CUDA."
        )


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = []
    for row in rows:
        lines.append(f"{row.number}  {row.status:8}{row.took_s:6.1f} s  {row.does}")
        lines += [f"       {name}: {_shown(value)}" for name, value in row.figures.items()]
        lines += [f"       ! {note}" for note in row.notes]
    states = [row.status for row in rows]
    lines.append(", ".join(f"{states.count(each)} {each}" for each in ("ok", "failed", "not run")))
    return "\n".join(lines)


def as_json(device_type: str, rows: Sequence[Row]) -> str:
    """The rows as JSON."""
    return json.dumps({"device": device_type, "rows": [asdict(row) for row in rows]}, indent=1)


def _shown(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) and 0 < abs(value) < 1e-2 else str(value)
