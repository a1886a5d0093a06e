"""Token files through a real daemon.

What is served, what is refused, and in which dtype ids arrive.
"""

import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gyre_client import Loader
from gyre_client.errors import ConfigError, CorruptSample, GyreError, InvalidRequest
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection

from tests.conftest import StartDaemon
from tests.integration.datasets.token_sets import (
    IDS,
    LENGTH,
    Serve,
    epoch,
    refusals,
    serving,
    write_sets,
)
from tests.token_files import llm_c, megatron_idx


@pytest.fixture
def serve(gyred: StartDaemon, tmp_path: Path) -> Serve:
    """See `serving`."""
    return serving(gyred, tmp_path)


@pytest.mark.parametrize("kind", ["npy", "llm.c", "Megatron", "header_bytes", "flat"])
def test_files_of_every_kind_are_the_same_samples(serve: Serve, tmp_path: Path, kind: str) -> None:
    ids = IDS.astype("<u2")
    options: dict[str, Any] = {}
    name = "ids.bin"
    if kind == "npy":
        name = "ids.npy"
        np.save(tmp_path / name, ids)
    elif kind == "llm.c":
        (tmp_path / name).write_bytes(llm_c(ids))
    elif kind == "Megatron":
        ids.tofile(tmp_path / name)
        (tmp_path / "ids.idx").write_bytes(megatron_idx([1000, 2000], 2, 8))
    else:
        options = {"dtype": "uint16"} | ({"header_bytes": 6} if kind == "header_bytes" else {})
        (tmp_path / name).write_bytes(bytes(options.get("header_bytes", 0)) + ids.tobytes())
    daemon = serve(name, **options)
    assert np.array_equal(epoch(daemon), IDS.reshape(-1, LENGTH))
    assert np.array_equal(epoch(daemon, order="block"), IDS.reshape(-1, LENGTH))


@pytest.mark.parametrize(
    ("contents", "options", "error", "sentence"),
    [
        (
            b"\x89PNG\r\n\x1a\n" + bytes(500),
            {"dtype": "uint16"},
            CorruptSample,
            "it looks like an image",
        ),
        (
            IDS.astype("<i4").tobytes(),
            {"dtype": "uint16"},
            CorruptSample,
            "ids are int32, uint32 or int64. Correct `dtype`",
        ),
        (
            IDS.astype("<u2").tobytes(),
            {},
            ConfigError,
            "`dtype` is missing: .* Set it to one of uint8, uint16",
        ),
        (
            llm_c(IDS.astype("<u2")),
            {"dtype": "uint32"},
            ConfigError,
            "`dtype` is uint32, but shard ids.bin has a llm.c header",
        ),
        (llm_c(IDS.astype("<u2"))[:-4], {}, CorruptSample, "shard ids.bin is not whole"),
    ],
)
def test_files_of_other_types_are_refused_in_describe_and_in_sessions(
    serve: Serve,
    tmp_path: Path,
    contents: bytes,
    options: dict[str, Any],
    error: type[GyreError],
    sentence: str,
) -> None:
    (tmp_path / "ids.bin").write_bytes(contents)
    for refused in refusals(serve("ids.bin", **options)):
        assert type(refused) is error
        assert re.search(sentence, str(refused))


def test_an_id_outside_the_vocabulary_is_named_by_sample_shard_and_position(
    serve: Serve, tmp_path: Path
) -> None:
    ids = (IDS % 1000).astype("<i4")
    ids[2034], ids[777] = 1000, -1
    ids[:2000].tofile(tmp_path / "a.bin")
    ids[2000:].tofile(tmp_path / "b.bin")
    daemon = serve("*.bin", dtype="int32", vocabulary=1001)
    with Loader("set", batch_size=300, order="sequential", address=daemon.address) as loader:
        with pytest.raises(
            CorruptSample, match="id -1 at position 7 is outside the vocabulary of 1001 ids"
        ) as caught:
            next(loader)
        assert (caught.value.facts["sample_id"], caught.value.facts["shard"]) == ("77", "a.bin")
    ids[777] = 0
    ids[:2000].tofile(tmp_path / "a.bin")
    with Loader(
        "set",
        batch_size=3,
        order="sequential",
        address=serve("*.bin", dtype="int32", vocabulary=1000).address,
    ) as loader:
        batches: list[dict[str, torch.Tensor]] = []
        with pytest.raises(
            CorruptSample, match="id 1000 at position 4 is outside the vocabulary of 1000 ids"
        ) as caught:
            batches.extend(loader)
        assert (caught.value.facts["sample_id"], caught.value.facts["shard"]) == ("203", "b.bin")
    assert (
        torch.cat([batch["tokens"] for batch in batches]).flatten().tolist()
        == ids[: len(batches) * 3 * LENGTH].tolist()
    )


def test_megatrons_documents_are_samples_of_their_own_length(serve: Serve, tmp_path: Path) -> None:
    ids = (IDS % 1000).astype("<u2")
    ends = np.sort(np.random.default_rng(1).integers(0, len(ids), 40))
    bounds = [0, *ends.tolist(), len(ids)]
    ids.tofile(tmp_path / "ids.bin")
    index = megatron_idx(np.diff(bounds).tolist(), 2, 8, range(len(bounds)))
    (tmp_path / "ids.idx").write_bytes(index)
    keys: dict[str, Any] = {"samples": "documents", "sequence_length": None}
    with Loader(
        "set", batch_size=8, epochs=1, tail="drop", address=serve("ids.bin", **keys).address
    ) as loader:
        num_samples = 0
        for batch in loader:
            assert batch["tokens"].dtype == torch.int64
            places = batch["tokens.offsets"].tolist()
            for row, sample in enumerate(batch["sample_id"].tolist()):
                tokens = batch["tokens"][places[row] : places[row + 1]].tolist()
                assert tokens == ids[bounds[sample] : bounds[sample + 1]].tolist()
                num_samples += 1
    assert num_samples == len(ends) // 8 * 8
    wrong = int(np.argmax(ids))
    document = int(np.searchsorted(bounds, wrong, side="right")) - 1
    checked = serve("ids.bin", vocabulary=int(ids.max()), **keys)
    with (
        Loader("set", batch_size=41, order="sequential", address=checked.address) as loader,
        pytest.raises(CorruptSample, match=f"at position {wrong - bounds[document]}") as caught,
    ):
        next(loader)
    assert caught.value.facts["sample_id"] == str(document)


def test_ids_within_the_vocabulary_are_served(serve: Serve, tmp_path: Path) -> None:
    IDS.astype("<u2").tofile(tmp_path / "ids.bin")
    checked, unchecked = (serve("ids.bin", dtype="uint16", vocabulary=size) for size in (50257, 0))
    assert np.array_equal(epoch(checked), epoch(unchecked))
    with (
        Loader("set", batch_size=20, address=checked.address) as one,
        Loader("set", batch_size=20, address=unchecked.address) as two,
    ):
        assert one.fingerprint == two.fingerprint


ARRIVES = {
    ("uint8", "int64"): torch.int64,
    ("uint16", "int64"): torch.int64,
    ("uint32", "int64"): torch.int64,
    ("uint64", "int64"): torch.int64,
    ("uint8", "int32"): torch.int32,
    ("uint16", "int32"): torch.int32,
    ("uint16", "stored"): torch.uint16,
    ("uint64", "stored"): torch.uint64,
    ("int16", "int64"): torch.int16,
    ("int32", "int64"): torch.int32,
}


@pytest.mark.parametrize("is_shared", [True, False])
def test_ids_arrive_in_a_dtype_that_torch_computes_with(
    gyred: StartDaemon, tmp_path: Path, is_shared: bool
) -> None:
    """Through shared memory, and through gRPC."""
    for stored in {stored for stored, _ in ARRIVES}:
        np.save(tmp_path / f"{stored}.npy", IDS.astype(stored))
    table = {"format": "tokens", "sequence_length": LENGTH, "allow": "anyone"}
    datasets = {stored: {"uri": str(tmp_path / f"{stored}.npy"), **table} for stored, _ in ARRIVES}
    daemon = gyred({"datasets": datasets} | ({} if is_shared else {"listen": ["tcp:127.0.0.1:0"]}))
    address = next(event["listen"][0] for event in daemon.events() if event["event"] == "ready")
    for (stored, asked), arrives in ARRIVES.items():
        samples = IDS.astype(stored).reshape(-1, LENGTH)
        with Loader(stored, batch_size=20, address=address, token_dtype=asked) as loader:
            for batch in islice(loader, 20):
                assert batch["tokens"].dtype == arrives
                assert np.array_equal(batch["tokens"].numpy(), samples[batch["sample_id"].numpy()])
        if arrives == torch.int64:
            assert torch.nn.Embedding(1 << 16, 2)(batch["tokens"]).shape == (20, LENGTH, 2)
            assert batch["tokens"].max() < 1 << 16


def test_a_dtype_that_cannot_hold_the_ids_is_refused_at_once(serve: Serve, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", IDS.astype("<u4"))
    daemon = serve("ids.npy")
    for asked, sentence in (
        (
            "int32",
            (
                "token_dtype is 'int32', which cannot hold every uint32 id of the field 'tokens'; "
                "take 'int64'"
            ),
        ),
        ("float", "token_dtype is 'float'; it can be 'int64', 'int32', 'stored'"),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            Loader("set", batch_size=20, address=daemon.address, token_dtype=asked)


def test_widened_batches_hold_no_slot_however_many_are_kept(serve: Serve, tmp_path: Path) -> None:
    IDS.astype("<u2").tofile(tmp_path / "ids.bin")
    daemon = serve("ids.bin", dtype="uint16")

    def num_held(token_dtype: str) -> int:
        """Slots, while 40 batches are kept; those not read yet are the client's too."""
        with (
            Loader(
                "set",
                batch_size=20,
                address=daemon.address,
                token_dtype=token_dtype,
                prefetch_batches=2,
            ) as loader,
            Connection(parse_address(daemon.address)) as connection,
        ):
            kept = list(islice(loader.stream(), 40))
            stream: Any = loader._place._stream
            arenas = stream._attachment._arenas
            num_lent = arenas.num_lent()  # first: what arrives meanwhile is unread
            num_lent -= stream._next_step - stream._first_queued + len(stream.position.rest or ())
            assert connection.status().sessions
            assert len(kept) == 40
        return int(num_lent)

    assert num_held("int64") <= 0
    assert num_held("stored") > 0


def test_bytes_are_never_widened(gyred: StartDaemon, tmp_path: Path) -> None:
    write_sets(tmp_path, ["texts"], "tar")
    daemon = gyred(
        {"datasets": {"set": {"uri": str(tmp_path / "texts.tar"), "format": "webdataset"}}}
    )
    with Loader("set", batch_size=20, address=daemon.address) as loader:
        assert next(loader)["txt"].dtype == torch.uint8
