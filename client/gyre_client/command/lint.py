"""`gyre lint`: reads every shard and checks every sample, and names corrupt and odd ones."""

import argparse
from collections.abc import Iterable
from typing import Any

from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.arguments import dataset_of
from gyre_client.display.formatting import CommandOutput, facts, page_width, plain, size, stacked
from gyre_client.display.progress import progress_bar
from gyre_client.transport.connection import Connection

_MAX_LISTED = 100  # findings in the text for people; JSON has all that the daemon names
_KINDS = {pb.LintFinding.KIND_CORRUPT: "corrupt", pb.LintFinding.KIND_ODD: "odd"}


def lint(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the faults of a dataset; the exit status is 1 if there are any."""
    last, findings, num_left_out = pb.LintProgress(), list[pb.LintFinding](), 0
    with progress_bar("passes over shards") as bar:
        for last in connection.lint(dataset_of(args)):
            findings += last.findings
            num_left_out += last.num_left_out
            num_found = len(findings) + num_left_out
            note = f"{num_found:,} found" if num_found else ""
            bar.update(last.num_scanned + last.num_checked, 2 * last.num_shards, note)
    return _output(last, findings, num_left_out)


def _output(
    last: pb.LintProgress, findings: list[pb.LintFinding], num_left_out: int
) -> CommandOutput:
    findings.sort(key=lambda each: (each.shard, each.offset))
    value = {
        "num_shards": last.num_shards,
        "num_samples": last.num_samples,
        "num_bytes": last.num_bytes,
        "num_decoded": last.num_decoded,
        "not_decoded": dict(last.not_decoded),
        "num_findings": len(findings) + num_left_out,
        "findings": [_to_plain(each) for each in findings],
    }
    text = _text(last, findings, num_left_out)
    return CommandOutput(value, text, status=1 if findings or num_left_out else 0)


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


def _text(last: pb.LintProgress, findings: Iterable[pb.LintFinding], num_left_out: int) -> str:
    listed = list(findings)
    pairs = [
        ("shards", f"{last.num_shards:,}"),
        ("samples", f"{last.num_samples:,} checked, {size(last.num_bytes)} of fields with checks"),
        *([("media", _media(last))] if last.num_decoded or last.not_decoded else []),
        ("found", f"{len(listed) + num_left_out:,}" if listed else "nothing"),
    ]
    if not listed:
        return facts(pairs)
    rows = [
        (
            _kind(each),
            each.shard,
            str(each.offset),
            str(each.sample_id) if each.HasField("sample_id") else "-",
        )
        for each in listed[:_MAX_LISTED]
    ]
    # the reason has a separate line: it is longer than any column
    table = stacked(("KIND", "SHARD", "OFFSET", "SAMPLE"), rows, 4, page_width()).split("\n")
    lines = table[:1]
    for line, each in zip(table[1:], listed, strict=False):
        lines += [line, f"  {printable(each.reason)}"]
    num_more = len(listed) - len(rows) + num_left_out
    more = [f"... and {num_more:,} more"] if num_more else []
    return "\n".join([facts(pairs), "", *lines, *more])
