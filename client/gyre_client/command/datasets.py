"""`gyre datasets`, `describe`, `cat`, `index`, `measure`, `lint`, `convert` and `bench`.

`index` says which shards changed and which cursors fit, `measure` how long samples are, `lint`
which are corrupt or odd. `convert` writes a dataset again in another format, with that format's own
writer, and `bench` compares Gyre with other loaders on the user's own data.
"""

import argparse
import dataclasses
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shtab
from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.options import (
    add_engine_argument,
    add_transforms_argument,
    daemons_of,
    dataset_of,
    on_shards,
    option,
    transforms_of,
)
from gyre_client.command.output import (
    CommandOutput,
    Picture,
    facts,
    histogram_text,
    page_width,
    shows_colours,
    stacked,
    table,
    thumbnail,
)
from gyre_client.command.units import (
    INDEX_DIR,
    LOCAL,
    findings_of,
    merged_findings,
    unfinished_folder,
)
from gyre_client.display import (
    Decode,
    ProgressBar,
    Sample,
    Value,
    facts_of,
    fields_of,
    first_samples,
    media_type,
    plain,
    size,
    token_ids,
    words_of,
)
from gyre_client.errors import CorruptSample, GyreError, InvalidRequest, NotInstalled
from gyre_client.transport.arguments import (
    MAX_UINT32,
    MAX_UINT64,
    is_location,
    transform_list,
    whole,
)
from gyre_client.transport.connection import Connection

_MAX_SAMPLES = 1000
_MAX_HISTOGRAMS = 4  # in the text for people
_MAX_PICTURE_COLUMNS, _PICTURE_LINES = 60, 16


def add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only this command has."""
    parser.add_argument("--num", type=int, default=3, help="how many samples to show (3)")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle of samples (0)")


def describe(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns a dataset's size, fields, lengths and first samples; the daemon opens it."""
    whole("num", args.num, 0, _MAX_SAMPLES)
    dataset = dataset_of(args)
    description = connection.describe(dataset, with_lengths=True)
    pairs = facts_of(description, is_path=is_location(args.dataset, args.format))
    samples: list[Sample] = []
    if args.num:
        try:
            samples = first_samples(connection, dataset, description, args.num, args.seed)
        except GyreError as error:  # show the description all the same
            pairs.append(("shown", f"no sample: {' '.join(str(error).split())}"))
    heads, rows = fields_of(description.fields)
    text = f"{facts(pairs)}\n\n{table(heads, rows)}"
    more: list[str | Picture] = [
        f"\n{histogram_text(each, page_width())}" for each in description.lengths[:_MAX_HISTOGRAMS]
    ]
    if (num_more := len(description.lengths) - _MAX_HISTOGRAMS) > 0:
        more.append(f"\nlengths of {num_more:,} more fields: --json has them")
    for sample in samples:
        more += sample_text(sample, f"sample {sample.sample_id}")
    shown = [
        {
            "sample_id": each.sample_id,
            "fields": {name: words_of(value) for name, value in each.values.items()},
        }
        for each in samples
    ]
    value = plain(description) | {"samples": shown}
    return CommandOutput(value, text, more=more)


def sample_text(sample: Sample, head: str, decode: Decode | None = None) -> list[str | Picture]:
    """Returns the text about a sample, with pictures of its images where they can be drawn.

    `head` is the first line, and `decode` turns token ids into text.
    """
    parts: list[str | Picture] = [f"\n{head}"]
    for name, value in sample.values.items():
        shape = ", ".join(map(str, value.shape))
        parts.append(f"  {printable(name)}  {value.dtype} [{shape}]  {words_of(value)}")
        ids = None if isinstance(value.data, bytes) else token_ids(name, value)
        if decode and ids and (text := decode(ids)):
            parts.append(f"    {words_of(Value('uint8', [len(text)], text.encode()))}")
        if not isinstance(value.data, bytes) or not shows_colours(sys.stdout):
            continue
        if (media_type(value.data) or "").startswith("image/"):
            try:
                columns = min(_MAX_PICTURE_COLUMNS, page_width())
                picture = thumbnail(value.data, columns, _PICTURE_LINES)
                parts.append(picture or "  (this image cannot be drawn)")
            except NotInstalled as error:
                parts.append(f"  ({error})")
    return parts


def cat(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the first `args.num` samples of the shuffle by `args.seed`.

    Each is its sample_id and, by field, dtype, shape and value. The value of ragged bytes is text
    if they are UTF-8, else hexadecimal; all other values are (nested) lists.
    """
    whole("num", args.num, 1, MAX_UINT32)
    dataset = dataset_of(args)
    description = connection.describe(dataset)
    found = first_samples(connection, dataset, description, args.num, args.seed)
    samples = [
        {
            "sample_id": each.sample_id,
            "fields": {name: _plain(value) for name, value in each.values.items()},
        }
        for each in found
    ]
    parts = [part for each in found for part in sample_text(each, f"sample {each.sample_id}")]
    return CommandOutput(samples, f"sample {found[0].sample_id}", more=parts[1:])


def _plain(value: Value) -> dict[str, Any]:
    data = decoded(value.data) if isinstance(value.data, bytes) else value.data.tolist()
    return {"dtype": value.dtype, "shape": list(value.shape), "value": data}


def decoded(data: bytes) -> str:
    """Returns bytes as text if they are UTF-8, else in hexadecimal."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.hex()


def datasets(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the datasets that the daemon serves by name."""
    found = connection.list_datasets().datasets
    rows = [(each.name, each.format, "yes" if each.open else "no", each.uri) for each in found]
    text = table(("NAME", "FORMAT", "OPEN", "URI"), rows)
    if not rows:
        text = "This daemon serves no dataset by name."
    return CommandOutput([plain(each) for each in found], text)


_MAX_LISTED = 20  # shards in the text for people; JSON has all of them
_CHANGES = {
    pb.SHARD_CHANGE_INDEXED: "indexed",
    pb.SHARD_CHANGE_KEPT: "kept",
    pb.SHARD_CHANGE_RESTORED: "restored",
    pb.SHARD_CHANGE_CHANGED: "changed",
}
_MEANINGS = {
    "indexed": "indexed for the first time",
    "restored": "touched or put back, with the bytes that it had",
    "removed": "is no longer there",
    "changed": "has other bytes, or may have: no checksums of the earlier ones were taken",
}


def add_index_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only this command has."""
    about = "read all local shards now, so that a later touch of one is told from a change"
    parser.add_argument("--checksums", action="store_true", help=about)
    add_engine_argument(parser)


def index(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Builds the missing parts of a dataset's index, and shows the progress."""
    with ProgressBar("shards") as bar:
        if args.engine != LOCAL:
            on_shards(("index", "measure"), connection, args, None, bar)
        indexed = Indexed.of(connection.index(dataset_of(args), with_checksums=args.checksums), bar)
    return CommandOutput(indexed.to_plain(), indexed.to_text())


def add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `gyre measure`."""
    add_transforms_argument(parser)
    add_engine_argument(parser)


def measure(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Measures the samples under a chain of transforms, and returns their lengths."""
    dataset, transforms = dataset_of(args), transforms_of(args)
    with ProgressBar("shards") as bar:
        if args.engine != LOCAL:
            on_shards(("index", "measure"), connection, args, transforms, bar)
        indexed = Indexed.of(connection.index(dataset, transforms=transforms), bar)
    description = connection.describe(dataset, with_lengths=True, transforms=transforms)
    lengths = list(description.lengths)
    value = {
        "num_samples": description.num_samples,
        "num_measured": indexed.measured.shards_done if indexed.measured else 0,
        "num_reused": indexed.measured.num_reused if indexed.measured else 0,
        "lengths": {each.field: plain(each) for each in lengths},
    }
    text = "\n\n".join(histogram_text(each, page_width()) for each in lengths)
    return CommandOutput(value, text or "no field differs in length")


@dataclass(slots=True)
class Indexed:
    """An index and the shards it was made of.

    Attributes:
        last: The last message about it, which has the totals.
        num_reused: How many shards were not scanned again.
        columns: The columns that the filter of the dataset compares, by name.
        measured: The progress in measuring transformed samples; None without transforms that
            need it.
        changes: The change of each shard, by its name: a key of `_MEANINGS`, or "kept".
    """

    last: pb.IndexProgress = field(default_factory=pb.IndexProgress)
    num_reused: int = 0
    columns: dict[str, pb.ColumnProgress] = field(default_factory=dict)
    measured: pb.MeasuringProgress | None = None
    changes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, progress: Iterable[pb.IndexProgress], bar: ProgressBar) -> "Indexed":
        """Returns the finished index; until then, the bar shows the progress."""
        indexed = cls()
        for each in progress:
            if each.HasField("column"):
                indexed.columns[each.column.name] = each.column
                note = f"{each.column.name} read"
                bar.update(each.column.shards_done, each.num_shards, note)
                continue
            if each.HasField("measured"):
                indexed.measured = each.measured
                bar.update(each.measured.shards_done, each.num_shards, "measured")
                continue
            indexed.last = each
            indexed.num_reused += indexed.last.reused
            indexed.changes[indexed.last.shard] = _CHANGES.get(indexed.last.change, "indexed")
            num_samples = indexed.last.num_samples
            samples = counted(num_samples, "sample", ",") if num_samples else ""
            bar.update(indexed.last.shards_done, indexed.last.num_shards, samples)
        indexed.changes |= dict.fromkeys(indexed.last.removed, "removed")
        return indexed

    def to_plain(self) -> dict[str, Any]:
        """Returns JSON-ready values; `fingerprint_before` is None if no earlier one is known."""
        return {
            "num_shards": self.last.num_shards,
            "num_reused": self.num_reused,
            "num_samples": self.last.num_samples,
            "columns": {
                name: {"num_shards": each.shards_done, "num_reused": each.num_reused}
                for name, each in self.columns.items()
            },
            "num_measured": self.measured.shards_done if self.measured else 0,
            "shards": self.changes,
            "fingerprint": self.last.fingerprint,
            "fingerprint_before": self.last.fingerprint_before or None,
            "was_appended": self.last.was_appended,
        }

    def to_text(self) -> str:
        """Returns the text for people."""
        counts = Counter(self.changes.values())
        told = ", ".join(
            f"{counts[change]:,} {change}"
            for change in (*_CHANGES.values(), "removed")
            if counts[change]
        )
        pairs = [
            ("samples", f"{self.last.num_samples:,}"),
            ("shards", f"{self.last.num_shards:,}: {told}"),
            ("fingerprint", self.last.fingerprint),
            ("cursors", self._cursors(counts["changed"])),
        ]
        for name, column in self.columns.items():
            shards = counted(column.shards_done, "shard", ",")
            text = f"{name} of {shards}, {column.num_reused:,} of them read before"
            pairs.append(("column", text))
        if its := self.measured:
            shards = counted(its.shards_done, "shard", ",")
            pairs.append(("lengths", f"of {shards}, {its.num_reused:,} of them measured before"))
        rows = [
            (name, _MEANINGS[change])
            for name, change in sorted(self.changes.items())
            if change != "kept"
        ]
        if not rows:
            return facts(pairs)
        more = f"\n... and {len(rows) - _MAX_LISTED:,} more" if len(rows) > _MAX_LISTED else ""
        return f"{facts(pairs)}\n\n{table(('SHARD', 'WHAT IT IS'), rows[:_MAX_LISTED])}{more}"

    def _cursors(self, num_changed: int) -> str:
        before = self.last.fingerprint_before
        if not before:
            return "none is known that would have to fit"
        if self.last.was_appended:
            return (
                f"those of {before}, as it was before, fit; epochs that begin after a resume have "
                "the new samples, too"
            )
        if before != self.last.fingerprint:
            return f"those of {before}, as it was before, no longer fit"
        if num_changed:
            return (
                "all fit as before: a fingerprint covers only some of the bytes, "
                "and the changed ones are not among them"
            )
        return "all fit as before"


_MAX_NAMED = 100  # findings in the text for people; JSON has all that the daemon names
_KINDS = {pb.LintFinding.KIND_CORRUPT: "corrupt", pb.LintFinding.KIND_ODD: "odd"}


def lint(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the faults of a dataset; the exit status is 1 if there are any."""
    dataset = dataset_of(args)
    with ProgressBar("shards" if args.engine != LOCAL else "passes over shards") as bar:
        if args.engine != LOCAL:
            found = merged_findings(on_shards(("lint",), connection, args, None, bar))
            if not found.num_damaged:
                found.findings.extend(_unfit(connection, dataset))
        else:

            def show(now: pb.LintProgress, num_found: int) -> None:
                note = f"{num_found:,} found" if num_found else ""
                bar.update(now.num_scanned + now.num_checked, 2 * now.num_shards, note)

            found = findings_of(connection.lint(dataset), show)
    findings = sorted(found.findings, key=lambda each: (each.shard, each.offset))
    num_found = len(findings) + found.num_left_out
    value = {
        "num_shards": found.num_shards,
        "num_samples": found.num_samples,
        "num_bytes": found.num_bytes,
        "num_decoded": found.num_decoded,
        "not_decoded": dict(found.not_decoded),
        "num_findings": num_found,
        "findings": [{**plain(each), "kind": _kind_of(each)} for each in findings],
    }
    return CommandOutput(
        value, _lint_text(found, findings, num_found), status=1 if num_found else 0
    )


def _unfit(connection: Connection, dataset: pb.DatasetRef) -> Iterator[pb.LintFinding]:
    """Yields why shards that nodes checked apart do not make one dataset."""
    try:
        connection.describe(dataset, transforms=transform_list([]))
    except CorruptSample as error:
        offset = error.facts.get("offset", "")
        yield pb.LintFinding(
            kind=pb.LintFinding.KIND_CORRUPT,
            shard=error.facts.get("shard", ""),
            offset=int(offset) if offset.isdecimal() else 0,
            reason=error.facts.get("reason", str(error)),
        )


def _kind_of(finding: pb.LintFinding) -> str:
    return _KINDS.get(finding.kind, "corrupt")


def _media(last: pb.LintProgress) -> str:
    """How many images and sounds were decoded, and why others were not."""
    parts = [f"{last.num_decoded:,} decoded"]
    for reason, num in sorted(last.not_decoded.items()):
        parts.append(f"{num:,} not decoded: {printable(reason)}")
    return "; ".join(parts)


def _lint_text(last: pb.LintProgress, findings: Sequence[pb.LintFinding], num_found: int) -> str:
    pairs = [
        ("shards", f"{last.num_shards:,}"),
        ("samples", f"{last.num_samples:,} checked, {size(last.num_bytes)} of fields with checks"),
        *([("media", _media(last))] if last.num_decoded or last.not_decoded else []),
        ("found", f"{num_found:,}" if findings else "nothing"),
    ]
    if not findings:
        return facts(pairs)
    rows = [
        (
            _kind_of(each),
            each.shard,
            str(each.offset),
            str(each.sample_id) if each.HasField("sample_id") else "-",
        )
        for each in findings[:_MAX_NAMED]
    ]
    # the reason has a separate line: it is longer than any column
    [table] = stacked(("KIND", "SHARD", "OFFSET", "SAMPLE"), rows, 4, page_width())
    head, *cells = table.split("\n")
    lines = [head]
    for line, each in zip(cells, findings, strict=False):
        lines += [line, f"  {printable(each.reason)}"]
    num_more = num_found - len(rows)
    more = [f"... and {num_more:,} more"] if num_more else []
    return "\n".join([facts(pairs), "", *lines, *more])


FORMATS = ("webdataset", "mds", "parquet", "tokens")
_DTYPES = ("uint16", "uint32", "int32", "int64")


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only this command has."""
    add = parser.add_argument
    target = add("target", metavar="FOLDER", type=Path, help="to make and to fill")
    target.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    about = "the format to write; the folder's name, if it is one of them"
    add("--to", choices=FORMATS, help=about)
    about = (
        "a transform of each sample, such as `tokenize field=json key=text "
        "tokenizer=/models/tokenizer.json`; repeatable"
    )
    words = ("NAME", "KEY=VALUE")
    add("--transform", action="append", nargs="+", default=[], metavar=words, help=about)
    add_transforms_argument(parser)
    about = "a field to write; repeatable; all if absent"
    add("--column", action="append", default=[], metavar="NAME", help=about)
    add("--dtype", default="", choices=_DTYPES, help="of the ids in token files")
    about = "samples in a file (10000)"
    add("--samples-per-shard", type=int, default=10_000, metavar="N", help=about)
    add_engine_argument(parser, _share_index)


def _share_index(args: argparse.Namespace) -> None:
    """Lets the daemons of all nodes, and the one here, share the index of the dataset."""
    os.environ.setdefault(INDEX_DIR, str(unfinished_folder(args.target) / "index"))


def convert(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Writes the dataset in another format, and returns the number and size of its files.

    Raises:
        InvalidRequest: The folder exists, or the format cannot hold the fields.
        NotInstalled: The format's writer is missing.
    """
    # Imported late: numpy takes a while to import, and few commands need it.
    from gyre_client.command import conversion  # noqa: PLC0415

    kind = args.to or args.target.name
    if kind not in FORMATS:
        raise InvalidRequest(f"--to: no format is given. Write one of {', '.join(FORMATS)}.")
    if args.transform and args.transforms:
        raise InvalidRequest("--transform and --transforms: both are given. Leave one out.")
    transforms = transforms_of(args) or transform_list([*map(_table, args.transform)])
    wanted = conversion.Conversion(
        dataset_of(args),
        transforms,
        kind,
        args.column,
        whole("samples-per-shard", args.samples_per_shard, 1, MAX_UINT32),
        args.dtype,
    )
    is_tokens, began_s = kind == "tokens", time.monotonic()
    with ProgressBar("samples") as bar:

        def show(num_done: int, num_all: int, elements_per_s: float) -> None:
            bar.update(num_done, num_all, f"{elements_per_s:,.0f} tokens/s" if is_tokens else "")

        found = conversion.convert_dataset(
            connection, wanted, args.target, args.engine, daemons_of(connection, args), show
        )
    elapsed_s = time.monotonic() - began_s
    value: dict[str, Any] = {
        "folder": str(args.target),
        "format": kind,
        "num_samples": found["samples"],
        "num_files": found["files"],
        "num_bytes": found["bytes"],
        "seconds": elapsed_s,
    }
    pairs = [
        ("folder", args.target),
        ("format", kind),
        ("samples", f"{found['samples']:,}"),
        ("files", f"{found['files']:,}"),
        ("size", size(found["bytes"])),
    ]
    if is_tokens:
        value["num_tokens"] = found["elements"]
        pairs.append(("tokens", f"{found['elements']:,} in {elapsed_s:,.1f} s"))
    return CommandOutput(value, facts(pairs))


def _table(words: Sequence[str]) -> dict[str, object]:
    """Returns the transform that `NAME KEY=VALUE...` means."""
    name, *rest = words
    try:
        return {"name": name, **dict(map(option, rest))}
    except argparse.ArgumentTypeError as error:
        raise InvalidRequest(f"--transform {name}: {error}") from error


MAX_SECONDS = 600.0
BAR_CHARS = 30
NOTES = """\
A DataLoader reads samples by their numbers, in a full shuffle, as Gyre does; the others shuffle
files and 1,000 samples. In process: the training thread itself reads; with workers, or with Gyre,
it goes on meanwhile. THREAD CPU is the processor time that this thread spends on 1000 samples.
Fields are as stored. This measures loading alone: a trainer that is slower than its loader gains
nothing from a faster one."""


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only this command has."""
    parser.add_argument("--batch-size", type=int, default=256, help="samples per batch (256)")
    about = "how long each loader reads in each of two rounds (2)"
    parser.add_argument("--seconds", type=float, default=2.0, help=about)


def bench(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the measurements.

    Raises:
        InvalidRequest: This user cannot read the dataset's files as the daemon reads them, or they
            have fewer samples than a batch.
        NotInstalled: torch or numpy is missing.
    """
    try:
        # numpy and torch take a while to import, and only this command needs them
        comparison = importlib.import_module("gyre_client.bench")
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise NotInstalled.needs("gyre bench", error.name, "client") from error
    options = dict(args.option)
    batch_size = whole("batch-size", args.batch_size, 1, MAX_UINT32)
    if not 0 < args.seconds <= MAX_SECONDS:
        raise InvalidRequest(
            f"--seconds must be more than 0 and at most {MAX_SECONDS:.0f}, but is {args.seconds}"
        )
    description = connection.describe(dataset_of(args))
    if batch_size > description.num_samples:
        raise InvalidRequest(
            f"--batch-size is {batch_size}, but the dataset has only "
            f"{counted(description.num_samples, 'sample')}"
        )
    is_local_path = is_location(args.dataset, args.format) and "://" not in args.dataset
    task = {
        "dataset": str(Path(args.dataset).expanduser().absolute())
        if is_local_path
        else args.dataset,
        "batch_size": batch_size,
        "seconds": args.seconds,
        "seed": whole("seed", args.seed, 0, MAX_UINT64),
        "address": connection.address.text,
        "daemon_user": args.daemon_user,
        "is_location": is_location(args.dataset, args.format),
        "options": options or None,
    }
    with ProgressBar("measurements") as bar:
        was_cached, missing, medians = comparison.compare(description, task, bar.update)
    value = {
        "num_samples": description.num_samples,
        "num_bytes": description.num_bytes,
        "batch_size": batch_size,
        "seconds": args.seconds,
        "files_were_cached": was_cached,
        "missing": list(missing),
        "loaders": [
            dataclasses.asdict(contender) | results for contender, results in medians.items()
        ],
    }
    return CommandOutput(value, _text(description, args, value))


def _text(
    description: pb.DatasetDescription, args: argparse.Namespace, found: Mapping[str, Any]
) -> str:
    cache = "read once before" if found["files_were_cached"] else "larger than the page cache"
    about = (
        f"{printable(description.uri)}: {counted(description.num_samples, 'sample', ',')}, "
        f"{size(description.num_bytes)}, {printable(description.format)}; "
        f"batches of {args.batch_size}."
    )
    lines = [about, f"Files {cache}. Each loader ran alone, twice {args.seconds:g} s; medians."]
    if found["missing"]:
        lines.append(f"Not installed, so not measured: {', '.join(found['missing'])}.")
    if len(found["loaders"]) == 1:
        lines.append(f"No other loader here reads {printable(description.format)}.")
    fastest = max(each["samples_per_s"] for each in found["loaders"])
    rows = [
        (
            each["label"],
            f"{each['samples_per_s']:,.0f}",
            f"{size(each['bytes_per_s'])}/s",
            f"{each['first_batch_s']:.3f} s",
            f"{each['cpu_s_per_1000'] * 1e3:.2f} ms",
            "█" * max(1, round(BAR_CHARS * each["samples_per_s"] / fastest)),
        )
        for each in found["loaders"]
    ]
    columns = table(("LOADER", "SAMPLES/S", "DATA", "FIRST BATCH", "THREAD CPU", ""), rows)
    return "\n\n".join(["\n".join(lines), columns, NOTES])
