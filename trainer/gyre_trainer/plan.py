"""`gyre-train plan`: what becomes of each module, and what a step takes of a rank, before anything is trained."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from gyre_trainer.account import Account
from gyre_trainer.config import TrainConfig
from gyre_trainer.dry_run import dry_run, on_fake_ranks
from gyre_trainer.home import local_of
from gyre_trainer.live_bytes import CATEGORIES
from gyre_trainer.rotated import RotatedModule
from gyre_trainer.spread import Strategy, rotated

Accounts = Mapping[Strategy, Account]


@dataclass(frozen=True, slots=True)
class Entry:
    """One module, or several that are alike.

    Attributes:
        path: with the numbers replaced by * where they are several.
        rule: how it is cut: the name of the rule's class, "replicated", or "tied" to the slices of an earlier one.
        num_modules: that this entry is about.
        num_bytes: of their whole parameters.
        num_bytes_here: of what rank 0 keeps, which has the largest slices.
    """

    path: str
    rule: str
    num_modules: int
    num_bytes: int
    num_bytes_here: int


def entries(config: TrainConfig, num_ranks: int) -> list[Entry]:
    """The configured model's modules in their order, as they lie on rank 0 of so many."""
    with on_fake_ranks(num_ranks) as mesh:
        model = rotated(config, mesh)
        found = [*_rotated_modules(model), *_replicated_parameters(model)]
    order = {path: place for place, (path, _) in enumerate(model.named_modules())}
    return _merged(sorted(found, key=lambda entry: order[entry.path]))


def _rotated_modules(model: nn.Module) -> list[Entry]:
    homes, found = set(), []
    for path, module in model.named_modules():
        if isinstance(module, RotatedModule):
            home = module.rotation.home
            tied = id(home) in homes
            homes.add(id(home))
            rule = "tied" if tied else type(module.rotation.rule).__name__
            here = 0 if tied else home.flat.nbytes
            whole = 0 if tied else sum(parameter.nbytes for parameter in home.parameters)
            found.append(Entry(path, rule, 1, whole, here))
    return found


def _replicated_parameters(model: nn.Module) -> list[Entry]:
    found = []
    for path, module in model.named_modules():
        own = [local_of(each) for each in module.parameters(recurse=False) if _is_replicated(each)]
        num_bytes = sum(local.nbytes for local in own)
        if own:
            found.append(Entry(path, "replicated", 1, num_bytes, num_bytes))
    return found


def _is_replicated(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Replicate)


def _merged(found: Sequence[Entry]) -> list[Entry]:
    """Modules that differ in the numbers of their paths alone become one entry, at the place of the first."""
    merged: dict[tuple[str, str, int], Entry] = {}
    for entry in found:
        path = re.sub(r"\b\d+\b", "*", entry.path)
        key = path, entry.rule, entry.num_bytes
        before = merged.get(key)
        if before is None:
            merged[key] = entry
        else:
            merged[key] = Entry(
                path,
                entry.rule,
                before.num_modules + 1,
                before.num_bytes + entry.num_bytes,
                before.num_bytes_here + entry.num_bytes_here,
            )
    return list(merged.values())


def accounts(config: TrainConfig, num_ranks: int) -> dict[Strategy, Account]:
    """What one step takes of rank 0 under each strategy.

    Raises:
        ConfigError: the batch cannot be shared among so many ranks.
        RotationError: the model cannot.
    """
    return {strategy: dry_run(config, strategy, num_ranks) for strategy in Strategy}


def text(config: TrainConfig, num_ranks: int) -> str:
    """The whole plan, to be printed."""
    taken, found = accounts(config, num_ranks), entries(config, num_ranks)
    total = Entry("total", "", 0, sum(e.num_bytes for e in found), sum(e.num_bytes_here for e in found))
    modules = [["module", "rule", "bytes", "per rank"]]
    for entry in [*found, replace(total, num_modules=1)]:
        name = f"{entry.path} x{entry.num_modules}" if entry.num_modules > 1 else entry.path
        modules.append([name, entry.rule, mib(entry.num_bytes), mib(entry.num_bytes_here)])
    data = config.data
    rows = data.batch_size // num_ranks
    return "\n\n".join(
        [
            f"{num_ranks} ranks, {rows} x {data.sequence_length} tokens each per step; all figures in MiB",
            table(modules, num_texts=2),
            "At the moment of a step when most is alive on a rank:",
            peaks(taken),
        ]
    )


def peaks(taken: Accounts) -> str:
    """A table: each strategy's live bytes at its peak by category, their sum, and what it sends per step."""
    at_peak = {strategy: account.timeline.peak() for strategy, account in taken.items()}
    lines = [["", *taken]]
    lines += [[category, *(mib(peak[category]) for peak in at_peak.values())] for category in CATEGORIES]
    lines.append(["peak", *(mib(account.timeline.peak_bytes) for account in taken.values())])
    lines.append(["sent per step", *(mib(account.sent_bytes) for account in taken.values())])
    return table(lines, num_texts=1)


def table(lines: Sequence[Sequence[str]], *, num_texts: int) -> str:
    """Aligned columns, the first ``num_texts`` to the left."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < num_texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def mib(num_bytes: int) -> str:
    """In MiB, to four digits or so."""
    value = num_bytes / 2**20
    num_decimals = next((num for num, least in enumerate((1000, 100, 1)) if value >= least), 4 if num_bytes else 0)
    return f"{value:,.{num_decimals}f}"
