"""`gyre mix`: other weights for a running job, at all daemons of its ranks or at none."""

import argparse
import contextlib
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence

from gyre_common.counts import counted
from gyre_common.printable import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.arguments import dataset_of, more_addresses
from gyre_client.display.formatting import CommandOutput, plain
from gyre_client.errors import GyreError, InvalidRequest
from gyre_client.messages.arguments import MAX_UINT64, whole
from gyre_client.targets.target import given_address
from gyre_client.transport.address import parse_address
from gyre_client.transport.connection import Connection

Daemons = dict[str, Connection]  # by address
Answers = dict[str, pb.ChangeWeightsResponse]

_UNCHANGED = "nothing was changed"


def add_mix_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `gyre mix`."""
    add = parser.add_argument
    add(
        "--weights",
        type=weights,
        required=True,
        metavar="NAME=WEIGHT,...",
        help="of the sources; one that is not named is not read",
    )
    add("--from-step", type=int, required=True, metavar="S", help="the first step with them")
    add(
        "--job",
        action="append",
        default=[],
        help="which job, if several read the mixture; one name, or one for each --address",
    )
    parser.epilog = (
        "Give --address once for each daemon at which ranks of the job read. All of them change "
        "the weights, or none does."
    )


def weights(text: str) -> dict[str, float]:
    """Parses NAME=WEIGHT,NAME=WEIGHT,..."""
    found: dict[str, float] = {}
    for each in text.split(","):
        name, _, value = each.rpartition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not name or not 0 <= weight < math.inf:
            raise argparse.ArgumentTypeError(f"{each!r} is not NAME=WEIGHT, such as web=0.7")
        found[name.strip()] = weight
    return found


def mix(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Gives the running job on a mixture other weights from a step on.

    Raises:
        GyreError: A daemon refuses or is away, or ranks of the job read at other daemons. No daemon
            has the change then, unless the message says so.
    """
    request = pb.ChangeWeightsRequest(
        dataset=dataset_of(args),
        weights=args.weights,
        from_step=whole("from_step", args.from_step, 0, MAX_UINT64),
    )
    with _daemons(connection, args) as daemons:
        jobs = _check_all(daemons, request, _names(daemons, args.job))
        answers = _give_all(daemons, request, jobs)
    what = f"{printable(args.dataset)} with these weights from step {args.from_step} on"
    lines = [_line(answer, what) for answer in answers.values()]
    if len(answers) == 1:
        (answer,) = answers.values()
        return CommandOutput(plain(answer), lines[0])
    text = [f"{address}: {line}" for address, line in zip(answers, lines, strict=True)]
    value = [{"address": address, **plain(answer)} for address, answer in answers.items()]
    return CommandOutput(value, "\n".join(text))


def _line(answer: pb.ChangeWeightsResponse, what: str) -> str:
    ranks = counted(answer.num_ranks, "rank")
    return (
        f"{ranks} of the job {printable(answer.job)} read {what}; step {answer.earliest_step} "
        "would have been the earliest"
    )


@contextlib.contextmanager
def _daemons(connection: Connection, args: argparse.Namespace) -> Iterator[Daemons]:
    """The daemon that was named first, and the others."""
    found = {given_address(args.address) or "the private daemon": connection}
    with contextlib.ExitStack() as stack:
        for address in more_addresses(args):
            if address in found:
                raise InvalidRequest(f"the address {address} was given twice")
            parsed = parse_address(address, args.daemon_user)
            found[address] = stack.enter_context(Connection(parsed))
        yield found


def _names(daemons: Daemons, jobs: Sequence[str]) -> dict[str, str]:
    """The name by which to ask each daemon for the job; empty for the only one that there is."""
    if len(jobs) > 1 and len(jobs) != len(daemons):
        raise InvalidRequest(
            f"--job was given {len(jobs)} times and --address {len(daemons)} times. Give --job "
            "once, or once for each --address, in the same order."
        )
    names = jobs if len(jobs) > 1 else [*jobs, ""][:1] * len(daemons)
    return dict(zip(daemons, names, strict=True))


def _check_all(
    daemons: Daemons, request: pb.ChangeWeightsRequest, names: Mapping[str, str]
) -> dict[str, str]:
    """Checks that all daemons can change the weights, and that all ranks read at them.

    Returns the name that the job has at each of them, which `names` may leave open.

    Raises:
        GyreError: One of them refuses, or a rank reads at none.
    """
    answers: Answers = {}
    for address, connection in daemons.items():
        try:
            answers[address] = _ask(connection, request, pb.WEIGHTS_ACTION_CHECK, names[address])
        except GyreError as error:
            raise error.told(f"{_at(address, daemons)}{error}; {_UNCHANGED}") from error
    sizes = {answer.world_size for answer in answers.values()}
    if len(sizes) != 1:
        raise InvalidRequest(
            f"the daemons have jobs of {', '.join(map(str, sorted(sizes)))} ranks; name the job "
            f"with --job, or wait until all ranks read; {_UNCHANGED}"
        )
    (size,) = sizes
    here = {rank for answer in answers.values() for rank in answer.ranks}
    absent = [str(rank) for rank in range(size) if rank not in here][:100]
    if absent:
        ranks = "rank" if len(absent) == 1 else "ranks"
        where = "this daemon" if len(daemons) == 1 else "these daemons"
        raise InvalidRequest(
            f"{ranks} {', '.join(absent)} of {size} of the job do not read at {where} now. Give "
            "--address once for each daemon of the job, or wait until all ranks read; "
            f"{_UNCHANGED}"
        )
    return {address: answer.job for address, answer in answers.items()}


def _give_all(
    daemons: Daemons, request: pb.ChangeWeightsRequest, jobs: Mapping[str, str]
) -> Answers:
    """Changes the weights at all daemons; takes it back where one of them fails.

    Raises:
        GyreError: Why one of them failed, and which daemons have the change all the same.
    """
    answers: Answers = {}
    for address, connection in daemons.items():
        try:
            answers[address] = _ask(connection, request, pb.WEIGHTS_ACTION_GIVE, jobs[address])
        except GyreError as error:
            # it may have the change: perhaps only its answer was lost
            asked = {each: jobs[each] for each in (*answers, address)}
            kept = _withdraw(daemons, asked, request)
            raise error.told(f"{_at(address, daemons)}{error}; {_left(kept, asked)}") from error
        except KeyboardInterrupt:
            asked = {each: jobs[each] for each in (*answers, address)}
            print(f"gyre: {_left(_withdraw(daemons, asked, request), asked)}", file=sys.stderr)
            raise
    return answers


def _withdraw(
    daemons: Daemons, asked: Mapping[str, str], request: pb.ChangeWeightsRequest
) -> list[str]:
    """Takes a change back; returns the addresses where that failed, and why."""
    kept = []
    for address, job in asked.items():
        try:
            _ask(daemons[address], request, pb.WEIGHTS_ACTION_WITHDRAW, job)
        except GyreError as error:
            kept.append(f"{address} ({error})")
    return kept


def _left(kept: Sequence[str], asked: Collection[str]) -> str:
    """The state of the change at the daemons that were asked for it, in words."""
    if not kept:
        return f"the change was taken back, and {_UNCHANGED}"
    if len(kept) == len(asked):
        return f"the change could not be taken back: {', '.join(kept)} may have it"
    return (
        f"the change was taken back at the others, but {', '.join(kept)} may have it: if "
        "so, end all ranks of the job, and resume them from one state"
    )


def _ask(
    connection: Connection,
    request: pb.ChangeWeightsRequest,
    action: "pb.WeightsAction.ValueType",
    job: str,
) -> pb.ChangeWeightsResponse:
    asked = pb.ChangeWeightsRequest()
    asked.CopyFrom(request)
    asked.action = action
    asked.job = job
    return connection.change_weights(asked)


def _at(address: str, daemons: Daemons) -> str:
    return f"{address}: " if len(daemons) > 1 else ""
