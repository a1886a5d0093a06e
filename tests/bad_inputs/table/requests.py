"""Requests of every method. `sent` is the method's name and its message, or a list of messages."""

from typing import Any

from gyre_client.transport.arguments import option_value
from gyre_protos.v1 import loader_pb2 as pb

from tests.bad_inputs.row import SECRET, UNPRINTABLE, Row

TOKENS = pb.DatasetRef(name="tokens")
INVALID = ("INVALID_ARGUMENT", "InvalidRequest")
CONFIG = ("INVALID_ARGUMENT", "ConfigError")
NOT_ALLOWED = ("PERMISSION_DENIED", "NotAllowed")
UNKNOWN = ("NOT_FOUND", "UnknownDataset")
BEYOND = 1 << 63


def opening(**changes: Any) -> pb.OpenSessionRequest:
    """Returns a good request with changes; a message changes only the fields that it has."""
    request = pb.OpenSessionRequest(
        dataset=TOKENS,
        order=pb.OrderSpec(seed=1, global_batch_size=8),
        reader=pb.Reader(job="bad", rank=0, world_size=1),
    )
    request.MergeFrom(pb.OpenSessionRequest(**changes))
    return request


def order(**changes: Any) -> pb.OpenSessionRequest:
    return opening(order=pb.OrderSpec(**changes))


def without_batch_size(**changes: Any) -> pb.OpenSessionRequest:
    request = opening(**changes)
    request.order.global_batch_size = 0
    return request


OPENINGS: list[tuple[str, pb.OpenSessionRequest, tuple[str, str], str]] = [
    ("nothing at all", pb.OpenSessionRequest(), INVALID, "names no dataset|job's name"),
    ("no batch size", without_batch_size(), INVALID, "global batch size must be 1 to 2"),
    (
        "no batch size, steps left out",
        without_batch_size(skip_steps=pb.SkippedSteps(ranges=[pb.StepRange(stop=2)])),
        INVALID,
        "global batch size must be 1 to 2",
    ),
    ("batch of 2^60", order(global_batch_size=1 << 60), INVALID, "global batch size"),
    ("batch of 2^64-1", order(global_batch_size=2**64 - 1), INVALID, "global batch size"),
    (
        "batch of thousands of epochs",
        order(global_batch_size=2_000_000),
        INVALID,
        "more than 4096 times",
    ),
    (
        "batch over the budget",
        order(global_batch_size=900_000),
        ("RESOURCE_EXHAUSTED", "Overloaded"),
        "needs .* bytes",
    ),
    (
        "drop leaves nothing",
        order(global_batch_size=1000, tail=pb.TAIL_DROP),
        INVALID,
        "no whole batch of 1000",
    ),
    ("tail 17", order(tail=17), INVALID, "does not know tail 17"),
    ("tail -1", order(tail=-1), INVALID, "does not know tail -1"),
    ("mode 9", order(mode=9), INVALID, "does not know order mode 9"),
    ("mode 2^31-1", order(mode=2**31 - 1), INVALID, "does not know order mode 2147483647"),
    ("blocks without block", order(io_block_bytes=4096), INVALID, "has neither blocks"),
    ("buckets of `wrap`", order(bucket=pb.Bucket(field="x")), INVALID, "the tail `drop` or `pad`"),
    (
        "buckets of no field",
        order(bucket=pb.Bucket(), tail=pb.TAIL_DROP),
        INVALID,
        "names the field ''; only fields whose samples differ",
    ),
    (
        "buckets of 2^64-1 batches",
        order(bucket=pb.Bucket(window_batches=2**64 - 1), tail=pb.TAIL_PAD),
        INVALID,
        "window_batches = 18446744073709551615",
    ),
    ("window without block", order(window_blocks=4), INVALID, "has neither blocks"),
    (
        "block of 1 byte",
        order(mode=pb.ORDER_MODE_BLOCK, io_block_bytes=1),
        INVALID,
        "io_block is 1 bytes",
    ),
    (
        "block of 2^63",
        order(mode=pb.ORDER_MODE_BLOCK, io_block_bytes=BEYOND),
        INVALID,
        "io_block is",
    ),
    (
        "window of 2^40",
        order(mode=pb.ORDER_MODE_BLOCK, window_blocks=1 << 40),
        INVALID,
        "too wide|io_block",
    ),
    (
        "rank 5 of 2",
        opening(reader=pb.Reader(rank=5, world_size=2)),
        INVALID,
        "rank 5 of world size 2 does not exist",
    ),
    (
        "rank 2^32-1",
        opening(reader=pb.Reader(rank=2**32 - 1, world_size=1)),
        INVALID,
        "rank 4294967295",
    ),
    (
        "ranks that do not divide",
        opening(reader=pb.Reader(world_size=3)),
        INVALID,
        "not divisible by the world size 3",
    ),
    ("job of 300 characters", opening(reader=pb.Reader(job="j" * 300)), INVALID, "job's name"),
    ("epochs 2^63", opening(num_epochs=BEYOND), INVALID, "epochs"),
    ("epochs 2^64-1", opening(num_epochs=2**64 - 1), INVALID, "epochs"),
    ("prefetch 2^31", opening(prefetch_batches=1 << 31), INVALID, "prefetch_batches is"),
    ("prefetch 1025", opening(prefetch_batches=1025), INVALID, "prefetch_batches is"),
    ("step 2^63", opening(step=BEYOND), INVALID, "is beyond any training"),
    ("step 2^64-1", opening(step=2**64 - 1), INVALID, "is beyond any training"),
    ("weights of no mixture", opening(weights={"a": 1}), INVALID, "is no mixture"),
    (
        "job with control characters",
        opening(reader=pb.Reader(job=f"a{UNPRINTABLE}")),
        INVALID,
        "job",
    ),
    ("job with a line feed", opening(reader=pb.Reader(job="a\nb")), INVALID, "job"),
    ("job with a C1 control", opening(reader=pb.Reader(job="a\x85b")), INVALID, "job"),
    (
        "generation 2^64-1",
        opening(reader=pb.Reader(generation=2**64 - 1)),
        INVALID,
        "generation",
    ),
]
NAMES = {
    "empty": "",
    "a space": " ",
    "unknown": "wiki",
    "other case": "TOKENS",
    "dots": "..",
    "a parent": "../tokens",
    "an absolute path": "/etc/passwd",
    "percent-encoded": "%2e%2e%2ftokens",
    "NUL": "tokens\0",
    "line feed": "tokens\n",
    "escape sequences": UNPRINTABLE,
    "a URL": "s3://bucket/x",
    "a password": f"s3://user:{SECRET}@bucket/x",
    "bidi override": "\u202etokens",
    "60 kB": "x" * 60_000,
}
AD_HOC = {
    "a file": ("/etc/passwd", "tokens"),
    "proc": ("/proc/self/environ", "tokens"),
    "a device": ("/dev/zero", "tokens"),
    "a chain": ("zip://x::/data/x.zip", "tokens"),
    "a pipe": ("pipe:cat /etc/passwd", "webdataset"),
    "metadata service": ("http://169.254.169.254/latest", "tokens"),
    "no format": ("/data", ""),
    "password": (f"http://user:{SECRET}@127.0.0.1/x.bin", "tokens"),
}


def _by_name() -> list[Row]:
    """Every method that takes a dataset's name, with every name."""
    rows = []
    for words, name in NAMES.items():
        ref = pb.DatasetRef(name=name)
        sent = {
            "OpenSession": opening(dataset=ref),
            "DescribeDataset": pb.DescribeDatasetRequest(dataset=ref),
            "IndexDataset": pb.IndexDatasetRequest(dataset=ref),
            "PlanStep": pb.PlanStepRequest(
                dataset=ref, order=pb.OrderSpec(global_batch_size=8), world_size=1
            ),
            "PlanCost": pb.PlanCostRequest(dataset=ref, order=pb.OrderSpec(global_batch_size=8)),
            "ExplainStep": pb.ExplainStepRequest(dataset=ref),
        }
        rows += [
            Row(f"name {words}, {method}", (method, message), *UNKNOWN, "no dataset is named")
            for method, message in sent.items()
        ]
    return rows


def _ad_hoc() -> list[Row]:
    rows = []
    for words, (uri, format_) in AD_HOC.items():
        ref = pb.DatasetRef(ad_hoc=pb.AdHocDataset(uri=uri, format=format_))
        refused = ("PERMISSION_DENIED", "NotAllowed", "private daemon")
        for method, message in (
            ("OpenSession", opening(dataset=ref)),
            ("DescribeDataset", pb.DescribeDatasetRequest(dataset=ref)),
            ("IndexDataset", pb.IndexDatasetRequest(dataset=ref)),
        ):
            rows.append(Row(f"ad hoc {words}, {method}", (method, message), *refused))
    return rows


def planning(**changes: Any) -> pb.PlanStepRequest:
    order_ = changes.pop("order", pb.OrderSpec(global_batch_size=8))
    return pb.PlanStepRequest(**{"dataset": TOKENS, "world_size": 1, "order": order_, **changes})


CHAINS: list[tuple[str, list[dict[str, Any]], tuple[str, str], str]] = [
    ("a transform without a name", [{"size": 3}], CONFIG, "has no name"),
    ("an unknown transform", [{"name": "wrap"}], CONFIG, "wrap"),
    ("a module of the client", [{"name": "os:system"}], NOT_ALLOWED, "no code that clients"),
    (
        "a file of the client",
        [{"name": "tokenize", "field": "tokens", "tokenizer": "/etc/passwd"}],
        NOT_ALLOWED,
        "opens no files that clients name",
    ),
    (
        "samples of 4 GiB",
        [{"name": "crop_or_pad", "field": "tokens", "length": 1 << 30}],
        CONFIG,
        "bytes a sample",
    ),
    ("200 transforms", [{"name": "cast"}] * 200, CONFIG, "at most 128"),
]


def chain_of(tables: list[dict[str, Any]]) -> pb.TransformList:
    return pb.TransformList(transforms=[option_value(each).table for each in tables])


def chained(tables: list[dict[str, Any]]) -> pb.PlanStepRequest:
    return planning(transforms=chain_of(tables))


def locating(tables: list[dict[str, Any]]) -> pb.LocateStepRequest:
    return pb.LocateStepRequest(dataset=TOKENS, cursor=b"GYRE", transforms=chain_of(tables))


def costing(**changes: Any) -> pb.PlanCostRequest:
    return pb.PlanCostRequest(
        **{"dataset": TOKENS, "order": pb.OrderSpec(global_batch_size=8), **changes}
    )


PLANS: list[tuple[str, Any, tuple[str, str], str]] = [
    ("PlanStep no dataset", pb.PlanStepRequest(), INVALID, "names no dataset"),
    ("PlanStep rank 3 of 2", planning(rank=3, world_size=2), INVALID, "rank 3 of world size 2"),
    ("PlanStep world of 3", planning(world_size=3), INVALID, "not divisible"),
    ("PlanStep step 2^63", planning(step=BEYOND), INVALID, "step"),
    ("PlanStep step 2^64-1", planning(step=2**64 - 1), INVALID, "step"),
    ("PlanStep no batch", planning(order=pb.OrderSpec()), INVALID, "global batch size"),
    (
        "PlanStep stages that shrink",
        planning(stages=[pb.Stage(num_samples=8), pb.Stage(first_epoch=1, num_samples=4)]),
        INVALID,
        "epochs and samples rise",
    ),
    (
        "PlanStep stage of too much",
        planning(stages=[pb.Stage(num_samples=1 << 40)]),
        INVALID,
        "1099511627776 samples and its dataset",
    ),
    *(
        (f"{method} {words}", sent(chain), told, text)
        for method, sent in (("PlanStep", chained), ("LocateStep", locating))
        for words, chain, told, text in CHAINS
    ),
    (
        "LocateStep no cursor",
        pb.LocateStepRequest(dataset=TOKENS, transforms=pb.TransformList()),
        ("FAILED_PRECONDITION", "CursorRejected"),
        "damaged or is none",
    ),
    ("PlanStep mode 9", planning(order=pb.OrderSpec(mode=9)), INVALID, "order mode 9"),  # type: ignore[arg-type]
    ("PlanStep tail 9", planning(order=pb.OrderSpec(tail=9)), INVALID, "tail 9"),  # type: ignore[arg-type]
    ("PlanCost no dataset", pb.PlanCostRequest(), INVALID, "names no dataset"),
    (
        "PlanCost window 2^40",
        costing(order=pb.OrderSpec(global_batch_size=8, window_blocks=1 << 40)),
        INVALID,
        "too wide|io_block",
    ),
    ("ExplainStep no dataset", pb.ExplainStepRequest(), INVALID, "names no dataset"),
    (
        "ExplainStep step 2^64-1",
        pb.ExplainStepRequest(dataset=TOKENS, step=2**64 - 1),
        INVALID,
        "no batch of step",
    ),
    ("DescribeDataset no dataset", pb.DescribeDatasetRequest(), INVALID, "names no dataset"),
    ("IndexDataset no dataset", pb.IndexDatasetRequest(), INVALID, "names no dataset"),
    (
        "ReadPayload no session",
        pb.ReadPayloadRequest(),
        ("ABORTED", "LeaseExpired"),
        "is not open",
    ),
    (
        "ReadPayload unknown session",
        pb.ReadPayloadRequest(session_id="0" * 32),
        ("ABORTED", "LeaseExpired"),
        "is not open",
    ),
]


def message(**event: Any) -> pb.StreamRequest:
    return pb.StreamRequest(**event)


STREAMS: list[tuple[str, list[pb.StreamRequest], tuple[str, str], str]] = [
    ("stream of nothing", [], INVALID, "must be `attach`"),
    ("stream of an empty message", [pb.StreamRequest()], INVALID, "must be `attach`"),
    (
        "stream begins with a heartbeat",
        [message(heartbeat=pb.Heartbeat())],
        INVALID,
        "must be `attach`",
    ),
    (
        "stream begins with credit",
        [message(credit=pb.Credit(num_batches=4))],
        INVALID,
        "must be `attach`",
    ),
    (
        "stream attaches to nothing",
        [message(attach=pb.Attach())],
        ("ABORTED", "LeaseExpired"),
        "is not open",
    ),
    (
        "stream attaches to a stranger",
        [message(attach=pb.Attach(session_id="f" * 32))],
        ("ABORTED", "LeaseExpired"),
        "is not open",
    ),
    (
        "stream attaches to a path",
        [message(attach=pb.Attach(session_id="../../etc/passwd"))],
        ("ABORTED", "LeaseExpired"),
        "is not open",
    ),
]
# After a good `attach` of another session.
ATTACHED: list[tuple[str, pb.StreamRequest, tuple[str, str], str]] = [
    ("second attach", message(attach=pb.Attach(session_id="x")), INVALID, "must be `credit`"),
    ("empty event", pb.StreamRequest(), INVALID, "must be `credit`"),
]
# What a client may send by mistake, and what changes nothing. `sent` is as in ATTACHED.
HARMLESS = {
    "releases of steps that were not sent": pb.Release(steps=[0, 0, BEYOND, 7]),
    "a release of nothing": pb.Release(),
    "10,000 releases of one step": pb.Release(steps=[5] * 10_000),
    "unmapped arenas that do not exist": pb.Unmapped(arenas=[4000, 4000, 2**32 - 1]),
    "credit of zero": pb.Credit(),
    "false releases with credit": pb.Credit(num_batches=1, released_steps=[99, 99]),
    "nan waited": pb.Credit(num_batches=1, waited_s=float("nan")),
    "negative waited": pb.Credit(num_batches=1, waited_s=-1.0),
    "infinite waited": pb.Credit(num_batches=1, waited_s=float("inf")),
}
HARMLESS_ROWS = [Row(f"stream {words}", sent, "", "", "") for words, sent in HARMLESS.items()]
ROWS = [
    *(
        Row(f"open {words}", ("OpenSession", sent), *told, text)
        for words, sent, told, text in OPENINGS
    ),
    *_by_name(),
    *_ad_hoc(),
    *(Row(words, (words.split()[0], sent), *told, text) for words, sent, told, text in PLANS),
    *(Row(words, ("Stream", sent), *told, text) for words, sent, told, text in STREAMS),
    *(Row(words, ("Attached", sent), *told, text) for words, sent, told, text in ATTACHED),
]
