"""`gyre lint`: reads every shard and checks every sample, and names corrupt and odd ones."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.arguments import dataset_of
from gyre_client.command.engine import on_shards
from gyre_client.display.formatting import CommandOutput, facts, page_width, plain, size, stacked
from gyre_client.display.progress import progress_bar
from gyre_client.errors import CorruptSample
from gyre_client.messages.requests import transform_list
from gyre_client.prepare.shards import findings_of, merged_findings
from gyre_client.prepare.units import LOCAL
from gyre_client.transport.connection import Connection

_MAX_LISTED = 100  # findings in the text for people; JSON has all that the daemon names
_KINDS = {pb.LintFinding.KIND_CORRUPT: "corrupt", pb.LintFinding.KIND_ODD: "odd"}


def lint(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the faults of a dataset; the exit status is 1 if there are any."""
    dataset = dataset_of(args)
    with progress_bar("shards" if args.engine != LOCAL else "passes over shards") as bar:
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
        "findings": [_to_plain(each) for each in findings],
    }
    return CommandOutput(value, _text(found, findings, num_found), status=1 if num_found else 0)


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


def _kind(finding: pb.LintFinding) -> str:
    return _KINDS.get(finding.kind, "corrupt")


def _to_plain(finding: pb.LintFinding) -> dict[str, Any]:
    return {**plain(finding), "kind": _kind(finding)}


def _media(last: pb.LintProgress) -> str:
    """How many images and sounds were decoded, and why others were not."""
    parts = [f"{last.num_decoded:,} decoded"]
    for reason, num in sorted(last.not_decoded.items()):
        parts.append(f"{num:,} not decoded: {printable(reason)}")
    return "; ".join(parts)


def _text(last: pb.LintProgress, findings: Sequence[pb.LintFinding], num_found: int) -> str:
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
            _kind(each),
            each.shard,
            str(each.offset),
            str(each.sample_id) if each.HasField("sample_id") else "-",
        )
        for each in findings[:_MAX_LISTED]
    ]
    # the reason has a separate line: it is longer than any column
    table = stacked(("KIND", "SHARD", "OFFSET", "SAMPLE"), rows, 4, page_width()).split("\n")
    lines = table[:1]
    for line, each in zip(table[1:], findings, strict=False):
        lines += [line, f"  {printable(each.reason)}"]
    num_more = num_found - len(rows)
    more = [f"... and {num_more:,} more"] if num_more else []
    return "\n".join([facts(pairs), "", *lines, *more])
