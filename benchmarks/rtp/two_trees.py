"""The CPU time of a step in two trees of the source, side by side.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.rtp.two_trees /tmp/before [--ranks 2]
        [--what default Llama Mixtral T5 "Llama, LoRA" Bert] [--width 1024] [--sequences 8]

Each tree has ranks of its own, which live through the whole run. In each round the trees take
turns, so both see the same load of the machine. A row is of the tiny modules of `host_cost` slice
by slice ("gyre"), the same with its hops left out ("no hops") or as by default ("default"), or of a
family of `models` slice by slice ("Llama", and "FSDP2 Llama" for its contender), which has two
layers of `--width` and `--sequences` of 64 tokens on each rank.
Figures are of the ranks' mean: milliseconds of CPU time in the old tree, and the median ratio of
the rounds, of the process and of the thread that computes. The last column is what the computing
thread takes more than that of the plain model in the same tree, new to old; only the tiny modules
have one.
"""

import argparse
import inspect
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

_NUM_WARM_UP_STEPS = 4
_STEPS_PER_TURN = 4
_PACKAGES = ("client", "common", "daemon", "protos", "trainer")
_PLAIN = "plain"
_TIMEOUT = timedelta(minutes=10)
_TOY_WIDTH, _TOY_SEQUENCES = 256, 2  # of `models`
_WIDTHS = {"hidden_size", "intermediate_size", "n_embd", "d_model", "d_kv", "d_ff", "head_dim"}
Took = tuple[float, float]  # milliseconds of a step: of the process, of the computing thread


def _step_of(what: str, num_sequences: int) -> Callable[[], object]:
    """A function that takes one step, with the code of the tree that this process imports."""
    from benchmarks.rtp import models, speed  # noqa: PLC0415  # in the parent, another tree's
    from benchmarks.rtp.contenders import Contender, How, build  # noqa: PLC0415
    from benchmarks.rtp.workloads import NARROW, make_batch, make_optimizer  # noqa: PLC0415

    by_slice = getattr(How, "BY_SLICE", How.GYRE)  # once the default
    hows = {
        _PLAIN: How.ALONE,
        "gyre": by_slice,
        "no hops": by_slice,
        "default": How.GYRE,
        "FSDP2": How.FSDP2_SUB_BLOCK,
    }
    if what not in hows:
        sharded = what.startswith("FSDP2 ")
        built: Callable[..., Any] = (
            models._fully_sharded
            if sharded
            else partial(cast("Any", models._rotated), **_every_size(models._rotated))
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        rows = torch.randint(1, models._VOCABULARY, (num_sequences, 64), generator=generator)
        return models._Training(built(what.removeprefix("FSDP2 ")), rows).step
    device = torch.device("cpu")
    model = build(Contender(hows[what]), NARROW, speed.own_mesh(), device, fake=False)
    optimizer, batch = make_optimizer(NARROW, model), make_batch(NARROW, 1, device)
    made = next(iter(speed.Hops))
    hops = speed.Hops.LEFT_OUT if what == "no hops" else made

    def step() -> None:
        with speed.hopping(hops):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def _widen(width: int) -> None:
    """Let all families of `models` have this width, and their other widths in proportion."""
    from benchmarks.rtp import models  # noqa: PLC0415

    for sizes in (models._COMMON, *models._SIZES.values()):
        for name in _WIDTHS & sizes.keys():
            sizes[name] = sizes[name] * width // _TOY_WIDTH


def _every_size(build: Callable[..., object]) -> dict[str, int]:
    """The argument that lets small modules rotate, by its name in the tree."""
    names = inspect.signature(build).parameters
    return {name: 0 for name in ("min_numel", "bundle_numel") if name in names}


def serve(
    rank: int, num_ranks: int, width: int, num_sequences: int, store: str, what: list[str]
) -> None:
    """Be a rank: take a turn for each line of the standard input, and print a step's times."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=_TIMEOUT
    )
    _widen(width)
    steps = {}
    for each in what:
        steps[each] = _step_of(each, num_sequences)
        for _ in range(_NUM_WARM_UP_STEPS):
            steps[each]()
    print("ready", flush=True)
    for line in sys.stdin:
        dist.barrier()
        before = time.process_time(), time.thread_time()
        for _ in range(_STEPS_PER_TURN):
            steps[line.strip()]()
        after = time.process_time(), time.thread_time()
        print(*(1e3 * (b - a) / _STEPS_PER_TURN for a, b in zip(before, after, strict=True)))
        sys.stdout.flush()
    dist.destroy_process_group()


class Tree:
    """The ranks of one tree."""

    def __init__(self, root: Path, num_ranks: int, sizes: list[str], store: Path, what: list[str]):
        paths = [str(root), *(str(root / name) for name in _PACKAGES)]
        environment = os.environ | {"PYTHONPATH": ":".join(paths), "GLOO_SOCKET_IFNAME": "lo"}
        # -P: files next to this one must not be found before the tree
        command = [sys.executable, "-P", __file__, "--serve"]
        self.ranks = [
            subprocess.Popen(
                [*command, str(rank), str(num_ranks), *sizes, str(store), *what],
                cwd=root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]

    def answers(self) -> list[str]:
        """A line of each rank.

        Raises:
            RuntimeError: a rank has ended; its error output says why.
        """
        lines = [rank.stdout.readline() for rank in self.ranks if rank.stdout]
        if not all(lines):
            raise RuntimeError(f"rank {lines.index('')} has ended; its error is above")
        return lines

    def turn(self, what: str) -> Took:
        """The times of a step, the mean of the ranks."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{what}\n")
            rank.stdin.flush()
        cpu, computing = zip(*(map(float, line.split()) for line in self.answers()), strict=True)
        return statistics.mean(cpu), statistics.mean(computing)

    @contextmanager
    def running(self) -> Iterator["Tree"]:
        """A context at whose end all ranks have ended."""
        try:
            yield self
        finally:
            for rank in self.ranks:
                if rank.stdin:
                    rank.stdin.close()
            for rank in self.ranks:
                rank.wait(_TIMEOUT.total_seconds())


def measure(
    roots: list[Path], num_ranks: int, num_rounds: int, sizes: list[str], what: list[str]
) -> list[str]:
    """The rows of the table."""
    turns = [_PLAIN, *what]
    found: dict[tuple[int, str], list[Took]] = {(i, each): [] for i in (0, 1) for each in turns}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trees = [
            stack.enter_context(Tree(root, num_ranks, sizes, Path(folder, str(i)), turns).running())
            for i, root in enumerate(roots)
        ]
        for tree in trees:
            tree.answers()
        for round_ in range(num_rounds):
            for each in turns:
                for i in (0, 1) if round_ % 2 else (1, 0):
                    found[i, each].append(trees[i].turn(each))
    return [_row(num_ranks, each, found) for each in what]


def _row(num_ranks: int, what: str, found: dict[tuple[int, str], list[Took]]) -> str:
    old, new = found[0, what], found[1, what]
    more = [
        statistics.median(
            one[1] - plain[1] for one, plain in zip(found[i, what], found[i, _PLAIN], strict=True)
        )
        for i in (0, 1)
    ]
    is_tiny = what in ("gyre", "no hops", "default", "FSDP2")
    cells = [
        str(num_ranks),
        what,
        f"{statistics.median(one[0] for one in old):.1f}",
        *(
            f"{statistics.median(b[clock] / a[clock] for a, b in zip(old, new, strict=True)):.2f}"
            for clock in (0, 1)
        ),
        f"{more[1] / more[0]:.2f}" if is_tiny else "",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        *numbers, store = sys.argv[2:7]
        serve(*map(int, numbers), store, sys.argv[7:])  # type: ignore[call-arg, arg-type]
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="the root of the other tree")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=_TOY_WIDTH)
    parser.add_argument("--sequences", type=int, default=_TOY_SEQUENCES)
    parser.add_argument("--what", nargs="+", default=["gyre", "no hops", "default"])
    options = parser.parse_args()
    roots = [options.old.resolve(), Path(__file__).resolve().parents[2]]
    sizes = [str(options.width), str(options.sequences)]
    print(f"load average {os.getloadavg()[0]:.1f}\n")
    print("| ranks | | CPU before, ms | CPU, new to old | computing thread | more than plain |")
    print("|---:|---|---:|---:|---:|---:|", flush=True)
    for num_ranks in options.ranks:
        rows = measure(roots, num_ranks, options.rounds, sizes, options.what)
        print("\n".join(rows), flush=True)
    print(f"\nload average at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
