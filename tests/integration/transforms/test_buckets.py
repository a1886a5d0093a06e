"""Batches of similar lengths through a real daemon, on ranks that come and go."""

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gyre_client import Loader, padded
from gyre_client.command.cli import main
from gyre_client.errors import CursorRejected, InvalidRequest
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb
from PIL import Image

from tests.batches import Batch, ids
from tests.conftest import Daemon, StartDaemon
from tests.elastic import Stage, in_stages
from tests.packing import documents

DOCUMENTS = documents(150, seed=2)
BUCKET: dict[str, Any] = {"field": "tokens", "window_batches": 6}
TRUNCATE = {"name": "truncate", "field": "tokens", "length": 60}


@pytest.fixture
def served(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    """A daemon with documents of token ids, and a mixture of them."""
    rows = [each.tolist() for each in DOCUMENTS]
    table = pa.table({"tokens": pa.array(rows, pa.list_(pa.int32())), "id": range(len(rows))})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=40)
    tables = {
        "datasets": {"docs": {"uri": str(tmp_path)}},
        "mixtures": {"mix": {"epochs": {"docs": 1}}},
    }
    return gyred({"num_transform_workers": 1, **tables})


def loader(daemon: Daemon, rank: int = 0, world_size: int = 1, **keys: Any) -> Loader:
    keys = {"tail": "drop", "bucket": BUCKET, **keys}
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
    return Loader(
        keys.pop("dataset", "docs"), batch_size=8, seed=5, address=daemon.address, **ranks, **keys
    )


def test_two_ranks_then_one_read_the_batches_of_one(
    served: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    with loader(served) as alone:
        whole = list(islice(alone.stream(), 30))
        assert len(alone) == 18
    assert len(set(ids(whole[:18]))) == 18 * 8
    check_documents(whole)
    stages = [Stage(2, 10, kill_before=7), Stage(1, 20)]
    found, state = in_stages(served, partial(loader, served), stages, ids)
    assert found == [ids([batch]) for batch in whole]
    with pytest.raises(CursorRejected, match="buckets is 6 batches by `tokens` there and none"):
        resumed(loader(served, bucket=None), state)

    located = pb.LocateStepRequest(
        dataset=pb.DatasetRef(name="docs"), cursor=state["cursor"], step=3
    )
    with Connection(parse_address(served.address)) as connection:
        answer = connection.locate_step(located)
    assert [row.sample_id for row in answer.rows] == ids(whole[3:4])
    assert answer.order.bucket == pb.Bucket(**BUCKET)

    flags = ["--address", served.address, "--batch-size", "8", "--seed", "5", "--tail", "drop"]
    keys = [f"--bucket={key}={value}" for key, value in BUCKET.items()]
    assert main(["plan", "docs", *flags, "--step", "0:18", *keys]) == 0
    shown = capsys.readouterr().out
    with loader(served, bucket=None) as plain:
        before = [share(batch) for batch in plain]
    after = [share(batch) for batch in whole[:18]]
    assert sum(after) < 0.6 * sum(before)
    assert (
        f"in the mean {sum(after) / 18:.1%} of a step is padding, and {sum(before) / 18:.1%} "
        "without buckets"
    ) in shown
    assert " ".join(map(str, ids(whole[3:4]))) in shown


def test_lengths_that_transforms_make_decide(served: Daemon) -> None:
    with loader(served, transform=[TRUNCATE], tail="pad") as truncated:
        batches = list(truncated)
        state = truncated.state_dict()
    assert sorted(set(ids(batches))) == list(range(150))
    lengths = [batch["tokens.offsets"].diff() for batch in batches[:6]]
    assert max(int(each.max()) for each in lengths) == 60
    spans = sorted((int(each.min()), int(each.max())) for each in lengths)
    ends = [end for span in spans for end in span]
    assert ends == sorted(ends)
    with pytest.raises(CursorRejected, match="begin a new run: its batches follow"):
        resumed(loader(served, tail="pad"), state, changed_transforms=True)


def test_images_of_several_sizes_come_with_their_shapes(
    private_daemon: None, tmp_path: Path
) -> None:
    rng, pictures = np.random.default_rng(0), []
    for number in range(24):
        height, width = rng.integers(10, 80, 2).tolist()
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number:02}.png")
        pictures.append(torch.from_numpy(pixels))
    chain = [{"name": "decode_image", "field": "file"}, {"name": "flatten"}]
    bucket = {"field": "image", "window_batches": 3}
    keys: dict[str, Any] = {"format": "files", "batch_size": 8, "tail": "drop", "bucket": bucket}
    with Loader(str(tmp_path), transform=chain, **keys) as images:
        batches = list(images)
    assert sorted(ids(batches)) == list(range(24))
    spans = []
    for batch in batches:
        assert batch["image_shape"].dtype == torch.int32
        sizes = batch["image.offsets"].diff().tolist()
        spans.append((min(sizes), max(sizes)))
        parts = torch.split(batch["image"], sizes)
        shapes = batch["image_shape"].tolist()
        for sample, part, shape in zip(batch["sample_id"].tolist(), parts, shapes, strict=True):
            assert torch.equal(part.view(*shape), pictures[sample])
    ends = [end for span in sorted(spans) for end in span]
    assert ends == sorted(ends)


def test_what_has_no_buckets_is_refused(served: Daemon) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "use the tail `drop` or `pad`": {"tail": "wrap"},
        "order `full` or `sequential`": {"order": "block"},
        "only fields whose samples differ in length can be sorted": {"bucket": {"field": "id"}},
        "names no field": {"bucket": {"window_batches": 8}},
        "has no key 'window'": {"bucket": {**BUCKET, "window": 8}},
        "window_batches = 262144": {"bucket": {**BUCKET, "window_batches": 1 << 18}},
        "`bucket` does not go with `pack`": {"pack": {"field": "tokens", "length": 999}},
        "`bucket` does not go with a mixture": {"dataset": "mix"},
    }
    for message, keys in wrong.items():
        with pytest.raises(InvalidRequest, match=message):
            next(loader(served, **keys))


def resumed(it: Loader, state: dict[str, Any], **keys: Any) -> None:
    with it:
        it.load_state_dict(state, **keys)
        next(it)


def check_documents(batches: list[Batch]) -> None:
    """Checks what batches say of their documents, as it comes and padded."""
    for batch in batches:
        tokens, mask = padded(batch, "tokens", value=-1)
        for sample, row, counts in zip(batch["sample_id"].tolist(), tokens, mask, strict=True):
            document = torch.from_numpy(DOCUMENTS[sample])
            assert torch.equal(row[counts], document)
            assert (row[len(document) :] == -1).all()


def share(batch: Batch) -> float:
    """The share of a batch that is padding."""
    _, mask = padded(batch, "tokens")
    return 1 - float(mask.double().mean())
