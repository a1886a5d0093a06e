"""What a daemon delivers, held against the data it was given.

Formats, orders, ranks, jobs and storages.
"""

import http.server
import itertools
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import webdataset
from gyre_client import Loader, objects, texts
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import Daemon, S3Server, StartDaemon, write_tokens

TOKENS = {"format": "tokens", "dtype": "uint16", "sequence_length": 10}


@pytest.fixture(scope="module")
def tokens(shared_gyred: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    """300 samples of tokens in four shards."""
    folder = write_tokens(tmp_path_factory.mktemp("tokens"))
    return shared_gyred({"datasets": {"tokens": {"uri": str(folder), **TOKENS}}})


def collect(loader: Loader, num_batches: int) -> list[dict[str, torch.Tensor]]:
    return [next(iter(loader)) for _ in range(num_batches)]


def equal(first: list[dict[str, torch.Tensor]], second: list[dict[str, torch.Tensor]]) -> bool:
    return len(first) == len(second) and all(
        list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    )


def test_tokens_are_the_files_windows(gyred: StartDaemon, token_files: Path) -> None:
    daemon = gyred({"datasets": {"tokens": {"uri": str(token_files), **TOKENS, "stride": 7}}})
    windows = []
    for name in "abcd":
        tokens = np.fromfile(token_files / f"{name}.bin", np.uint16)
        windows += [tokens[begin : begin + 10] for begin in range(0, len(tokens) - 9, 7)]
    with Loader("tokens", batch_size=32, seed=1, tail="pad", address=daemon.address) as loader:
        seen = []
        for batch in loader:
            for sample_id, sample, real in zip(
                batch["sample_id"].tolist(), batch["tokens"].numpy(), batch["mask"], strict=True
            ):
                np.testing.assert_array_equal(sample, windows[sample_id])
                seen += [sample_id] if real else []
    assert sorted(seen) == list(range(len(windows)))
    assert seen != sorted(seen)


def test_ranks_share_each_global_batch(tokens: Daemon) -> None:
    with ExitStack() as stack:

        def read(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
            loader = Loader(
                "tokens",
                batch_size=24,
                seed=5,
                rank=rank,
                world_size=world_size,
                address=tokens.address,
            )
            return collect(stack.enter_context(loader), 40)  # three epochs and a bit

        whole = read(0, 1)
        for world_size in (2, 3):
            parts = [read(rank, world_size) for rank in range(world_size)]
            joined = [
                {name: torch.cat([part[step][name] for part in parts]) for name in whole[0]}
                for step in range(40)
            ]
            assert equal(joined, whole)


def test_jobs_with_different_seeds_at_once(tokens: Daemon) -> None:
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(Loader("tokens", batch_size=30, seed=seed, address=tokens.address))
            for seed in (1, 2)
        ]
        steps = list(zip(*loaders, strict=True))  # a batch of the one, a batch of the other
    first, second = (
        torch.cat([step[job]["sample_id"] for step in steps]).tolist() for job in range(2)
    )
    assert sorted(first) == sorted(second) == list(range(300))
    assert first != second


def write_text_shards(
    folder: Path, num_shards: int = 3, num_samples: int = 40
) -> list[dict[str, Any]]:
    """Tar shards by the webdataset library's own writer; gives the samples in their order."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    samples = []
    for shard in range(num_shards):
        with webdataset.TarWriter(str(folder / f"shard-{shard:03}.tar")) as writer:
            for index in range(num_samples):
                sample = {
                    "txt": "".join(generator.choice(list("abc dé"), generator.integers(0, 200))),
                    "json": {
                        "shard": shard,
                        "index": index,
                        "tags": ["x"] * int(generator.integers(0, 5)),
                    },
                    "cls": int(generator.integers(-5, 1000)),
                    "npy": generator.standard_normal((3, 4)).astype(np.float32),
                    "bin": generator.bytes(int(generator.integers(0, 3000))),
                }
                samples.append(sample)
                writer.write({"__key__": f"s{shard}/{index:05}", **sample})
    return samples


def check_text_batch(batch: dict[str, torch.Tensor], samples: list[dict[str, Any]]) -> None:
    wanted = [samples[sample_id] for sample_id in batch["sample_id"].tolist()]
    assert texts(batch, "txt") == [sample["txt"] for sample in wanted]
    assert objects(batch, "json") == [sample["json"] for sample in wanted]
    assert batch["cls"].tolist() == [sample["cls"] for sample in wanted]
    np.testing.assert_array_equal(
        batch["npy"].numpy(), np.stack([sample["npy"] for sample in wanted])
    )
    ends = batch["bin.offsets"].tolist()
    parts = [batch["bin"].numpy().tobytes()[begin:end] for begin, end in itertools.pairwise(ends)]
    assert parts == [sample["bin"] for sample in wanted]


def test_webdataset_fields_are_decoded(gyred: StartDaemon, tmp_path: Path) -> None:
    samples = write_text_shards(tmp_path / "shards")
    uri = str(tmp_path / "shards" / "shard-{000..002}.tar")
    daemon = gyred({"datasets": {"text": {"uri": uri, "format": "webdataset"}}})
    with Loader("text", batch_size=8, seed=9, address=daemon.address) as loader:
        seen = []
        for batch in loader:
            check_text_batch(batch, samples)
            seen += batch["sample_id"].tolist()
    assert sorted(seen) == list(range(120))


def test_index_is_kept_and_reused(gyred: StartDaemon, tmp_path: Path) -> None:
    write_text_shards(tmp_path / "shards")
    daemon = gyred(
        {
            "datasets": {
                "text": {"uri": str(tmp_path / "shards"), "format": "webdataset", "fields": ["cls"]}
            }
        }
    )
    with Loader("text", batch_size=8, address=daemon.address) as loader:
        before = collect(loader, 3)
    sidecars = sorted((tmp_path / "daemon-0" / "index").iterdir())
    assert [path.suffix for path in sidecars].count(".gyre-index") == 3
    written = [path.stat().st_mtime_ns for path in sidecars]
    daemon.stop()
    daemon.restart()
    with Loader("text", batch_size=8, address=daemon.address) as loader:
        assert equal(collect(loader, 3), before)
    assert [path.stat().st_mtime_ns for path in sidecars] == written


def test_object_storage_gives_the_same_batches_by_one_range_request_a_sample(
    gyred: StartDaemon, tmp_path: Path, s3_server: S3Server
) -> None:
    samples = write_text_shards(tmp_path / "shards")
    bucket = "batches"
    s3_server.make_bucket(bucket)
    for path in (tmp_path / "shards").iterdir():
        s3_server.put(bucket, f"data/{path.name}", path.read_bytes())
    daemon = gyred(
        {
            "hedge": False,
            "datasets": {
                "local": {"uri": str(tmp_path / "shards"), "format": "webdataset"},
                "remote": {
                    "uri": f"s3://{bucket}/data",
                    "format": "webdataset",
                    "storage": s3_server.storage_settings,
                    "cache": False,
                },
            },
        }
    )
    with ExitStack() as stack:
        local, remote = (
            stack.enter_context(
                Loader(name, batch_size=8, seed=2, restart=True, address=daemon.address)
            )
            for name in ("local", "remote")
        )
        assert local.fingerprint == remote.fingerprint
        before = s3_server.num_requests("GET", f"/{bucket}/data/")
        batches = list(remote)
        assert s3_server.num_requests("GET", f"/{bucket}/data/") - before == len(samples)
        assert equal(batches, list(local))
    for batch in batches:
        check_text_batch(batch, samples)
    assert daemon.stop() == 0


class SlowFiles(http.server.BaseHTTPRequestHandler):
    """Answers range requests after a random delay and notes who was served when."""

    protocol_version = "HTTP/1.1"
    content: ClassVar[bytes] = b""
    delays: ClassVar[random.Random]
    asked: ClassVar[list[int]]
    served: ClassVar[list[int]]
    at_once: ClassVar[list[int]]
    lock: ClassVar[threading.Lock]

    def do_HEAD(self) -> None:
        self._answer(200, self.content, {"Accept-Ranges": "bytes"}, with_body=False)

    def do_GET(self) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert match
        start, last = int(match[1]), int(match[2])
        with self.lock:
            self.asked.append(start)
            self.at_once.append(len(self.asked) - len(self.served))
            delay_s = self.delays.uniform(0.0, 0.06)
        time.sleep(delay_s)
        with self.lock:
            self.served.append(start)
        self._answer(
            206,
            self.content[start : last + 1],
            {"Content-Range": f"bytes {start}-{last}/{len(self.content)}"},
        )

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in {
            **headers,
            "Content-Length": str(len(body)),
            "ETag": '"1"',
            "Last-Modified": self.date_time_string(0),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def slow_files() -> Iterator[tuple[str, type[SlowFiles]]]:
    """The URL of an object server in which every request takes its own random time."""

    class Handler(SlowFiles):
        content = np.arange(20_000, dtype=np.uint16).tobytes()
        delays = random.Random(4)
        asked: ClassVar[list[int]] = []
        served: ClassVar[list[int]] = []
        at_once: ClassVar[list[int]] = []
        lock = threading.Lock()

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 512
        daemon_threads = False
        block_on_close = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/tokens.bin", Handler
        server.shutdown()
        thread.join()


def test_batches_are_the_same_whatever_the_order_of_completion(
    gyred: StartDaemon, tmp_path: Path, slow_files: tuple[str, type[SlowFiles]]
) -> None:
    url, server = slow_files
    local = tmp_path / "tokens.bin"
    local.write_bytes(server.content)
    slow = {"uri": url, "cache": False, **TOKENS}
    daemon = gyred(
        {"prefetch_batches": 4, "datasets": {"slow": slow, "local": {"uri": str(local), **TOKENS}}}
    )
    with ExitStack() as stack:

        def read(name: str) -> list[dict[str, torch.Tensor]]:
            return collect(
                stack.enter_context(Loader(name, batch_size=32, seed=6, address=daemon.address)), 12
            )

        wanted = read("local")
        for _ in range(2):
            begin = len(server.served)
            assert equal(read("slow"), wanted)
            assert server.asked[begin:] != server.served[begin:], (
                "the server answered in the order of the questions"
            )
    assert max(server.at_once) > 2 * 32, "requests of several batches must be in flight at once"
    daemon.stop()


def test_payload_is_bit_identical_from_run_to_run(gyred: StartDaemon, tmp_path: Path) -> None:
    write_text_shards(tmp_path / "shards")
    runs = []
    for _ in range(2):
        daemon = gyred(
            {"datasets": {"text": {"uri": str(tmp_path / "shards"), "format": "webdataset"}}}
        )
        with Loader("text", batch_size=12, seed=1, address=daemon.address) as loader:
            runs.append(
                [
                    {name: tensor.numpy().tobytes() for name, tensor in batch.items()}
                    for batch in collect(loader, 15)
                ]
            )
        daemon.stop()
    assert runs[0] == runs[1]


def test_indexing_reports_each_shard(gyred: StartDaemon, tmp_path: Path) -> None:
    write_text_shards(tmp_path / "shards", num_shards=5, num_samples=3)
    daemon = gyred(
        {"datasets": {"text": {"uri": str(tmp_path / "shards"), "format": "webdataset"}}}
    )
    with identified_channel(daemon.address) as channel:
        request = pb.IndexDatasetRequest(dataset=pb.DatasetRef(name="text"))
        first, second = (
            list(pb_grpc.LoaderStub(channel).IndexDataset(request, timeout=120)) for _ in range(2)
        )
    assert [progress.shards_done for progress in first] == [1, 2, 3, 4, 5]
    assert {progress.shard for progress in first} == {f"shard-{shard:03}.tar" for shard in range(5)}
    assert first[-1].num_samples == 15
    assert not any(progress.reused for progress in first)
    assert all(progress.reused for progress in second)
