"""Fields of tar shards through a real daemon and the real client.

Missing, optional, alternative, ragged, compressed.
"""

import gzip
import io
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from gyre_client import Loader, objects
from gyre_client.command.cli import main
from gyre_client.errors import CorruptSample

from tests.conftest import S3Server, StartDaemon

Sample = Mapping[str, Any]
Batch = Mapping[str, torch.Tensor]


def write_shards(folder: Path, shards: Sequence[Sequence[Sample]], ending: str = ".tar") -> Path:
    """By the webdataset library's own writer, which compresses where the name says so."""
    folder.mkdir()
    numbers = itertools.count()
    for number, samples in enumerate(shards):
        with webdataset.TarWriter(str(folder / f"shard-{number:03}{ending}")) as writer:
            for sample in samples:
                writer.write({"__key__": f"s{next(numbers):05}", **sample})
    return folder


def epoch(loader: Loader) -> Iterator[tuple[int, Batch, int]]:
    """Each sample's id, its batch, and its place there."""
    with loader:
        for batch in loader:
            for place, sample_id in enumerate(batch["sample_id"].tolist()):
                yield sample_id, batch, place


def ragged(batch: Batch, name: str, place: int) -> torch.Tensor:
    begin, end = batch[f"{name}.offsets"][place : place + 2].tolist()
    return batch[name][begin:end]


def serve(gyred: StartDaemon, folder: Path, **options: Any) -> Any:
    daemon = gyred({"datasets": {"set": {"uri": str(folder), "format": "webdataset", **options}}})
    return lambda **more: Loader(
        "set", batch_size=2, seed=3, epochs=1, address=daemon.address, **more
    )


def test_a_field_that_the_first_sample_lacks_is_an_error_at_opening(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    folder = write_shards(tmp_path / "set", [[{"txt": "no label"}, {"txt": "label", "cls": 1}]])
    with pytest.raises(
        CorruptSample, match=r"shard-000\.tar .*sample `s00000` has no member \.cls; .*`optional = "
    ) as caught:
        serve(gyred, folder)()
    assert (caught.value.facts["field"], caught.value.facts["key"]) == ("cls", "s00000")


def test_optional_fields_are_empty_or_zero_and_say_so(gyred: StartDaemon, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    samples = []
    for number in range(60):
        sample = {
            "bin": bytes([number]),
            "cls": number + 1,
            "json": {"number": number},
            "npy": np.full((2, 2), number, "<f4"),
        }
        samples.append(
            {
                name: value
                for name, value in sample.items()
                if name == "bin" or generator.random() < 0.5
            }
        )
    folder = write_shards(tmp_path / "set", [samples[:30], samples[30:]])
    load = serve(gyred, folder, optional=["cls", "json", "npy"])
    seen = []
    for sample_id, batch, place in epoch(load()):
        sample = samples[sample_id]
        seen.append(sample_id)
        assert set(list(batch)[-3:]) == {"cls.present", "json.present", "npy.present"}, (
            "they come last"
        )
        for name in ("cls", "json", "npy"):
            assert batch[f"{name}.present"].dtype == torch.bool
            assert bool(batch[f"{name}.present"][place]) == (name in sample)
        assert int(batch["cls"][place]) == sample.get("cls", 0)
        assert (
            batch["npy"][place].tolist() == np.asarray(sample.get("npy", np.zeros((2, 2)))).tolist()
        )
        text = ragged(batch, "json", place).numpy().tobytes()
        assert text == (b"" if "json" not in sample else text)
        if "json" in sample:
            assert objects(
                {"json": batch["json"], "json.offsets": batch["json.offsets"][place : place + 2]},
                "json",
            ) == [sample["json"]]
    assert sorted(seen) == list(range(60))


def test_an_optional_field_is_the_same_bytes_from_object_storage(
    gyred: StartDaemon, tmp_path: Path, s3_server: S3Server
) -> None:
    samples = [
        {"cls": number} if number % 3 else {"cls": number, "npy": np.arange(number % 5)}
        for number in range(40)
    ]
    folder = write_shards(tmp_path / "set", [samples])
    s3_server.make_bucket("optional")
    s3_server.put("optional", "set/shard-000.tar", (folder / "shard-000.tar").read_bytes())
    definition = {"format": "webdataset", "optional": ["npy"]}
    remote = {"uri": "s3://optional/set", "storage": s3_server.storage_settings, **definition}
    daemon = gyred({"datasets": {"local": {"uri": str(folder), **definition}, "remote": remote}})
    batches = []
    for name in ("local", "remote"):
        with Loader(name, batch_size=8, seed=1, epochs=1, address=daemon.address) as loader:
            batches.append(
                [{key: tensor.tolist() for key, tensor in batch.items()} for batch in loader]
            )
    assert batches[0] == batches[1]


def test_alternatives_are_one_field(gyred: StartDaemon, tmp_path: Path) -> None:
    samples = [
        {("jpg", "png", "webp")[number % 3]: bytes([number]) * number, "cls": number}
        for number in range(30)
    ]
    folder = write_shards(tmp_path / "set", [samples])
    for sample_id, batch, place in epoch(
        serve(gyred, folder, fields=["image=jpg;png;webp", "cls"])()
    ):
        assert list(batch) == ["sample_id", "image", "image.offsets", "cls"]
        assert ragged(batch, "image", place).tolist() == [sample_id] * sample_id
        assert int(batch["cls"][place]) == sample_id


@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_of_several_lengths_are_ragged(
    gyred: StartDaemon, tmp_path: Path, order: str
) -> None:
    generator = np.random.default_rng(1)
    arrays = [
        generator.integers(0, 99, (int(generator.integers(0, 6)), 3)).astype(f"{order}i4")
        for _ in range(40)
    ]
    folder = write_shards(
        tmp_path / "set",
        [[{"npy": each} for each in arrays[:15]], [{"npy": each} for each in arrays[15:]]],
    )
    load = serve(gyred, folder)
    for sample_id, batch, place in epoch(load()):
        assert batch["npy"].dtype == torch.int32
        assert batch["npy"].shape[1:] == (3,)
        assert ragged(batch, "npy", place).tolist() == arrays[sample_id].tolist()


def test_arrays_of_several_shapes_are_flattened(gyred: StartDaemon, tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    arrays = [generator.standard_normal(generator.integers(1, 4, 3)) for _ in range(40)]
    folder = write_shards(tmp_path / "set", [[{"npy": each} for each in arrays]])
    for sample_id, batch, place in epoch(serve(gyred, folder)()):
        shape = batch["npy.shape"][place].tolist()
        assert ragged(batch, "npy", place).reshape(shape).tolist() == arrays[sample_id].tolist()


def test_the_command_line_shows_such_fields(
    gyred: StartDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples: list[Sample] = [{"cls": 5, "npy": np.arange(3)}, {"npy": np.arange(2)}]
    folder = write_shards(tmp_path / "set", [samples])
    definition = {"uri": str(folder), "format": "webdataset", "optional": ["cls"]}
    daemon = gyred({"datasets": {"set": definition}})
    assert main(["describe", "set", "--address", daemon.address]) == 0
    fields = [
        line.split()[:2] for line in capsys.readouterr().out.split("\n\n")[1].splitlines()[1:]
    ]
    assert fields == [["cls", "int64"], ["npy", "int64"], ["cls.present", "bool"]]
    assert main(["cat", "set", "--num", "2", "--address", daemon.address]) == 0
    assert "cls.present  bool []  True" in capsys.readouterr().out
    assert main(["bench", "set", "--batch-size", "1", "--address", daemon.address]) == 2
    assert "has optional fields or arrays of several shapes" in capsys.readouterr().err


TEXTS = [{"txt": f"sample {number} " * (number % 7 + 1), "cls": number} for number in range(50)]


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz"])
def test_compressed_shards_are_the_same_dataset(
    gyred: StartDaemon, tmp_path: Path, ending: str
) -> None:
    plain = write_shards(tmp_path / "plain", [TEXTS[:20], TEXTS[20:]])
    packed = tmp_path / "packed"
    packed.mkdir()
    for path in plain.glob("*.tar"):
        (packed / path.name.replace(".tar", ending)).write_bytes(gzip.compress(path.read_bytes()))
    definitions = {
        name: {"uri": str(tmp_path / name), "format": "webdataset"} for name in ("plain", "packed")
    }
    daemon = gyred({"datasets": definitions})
    read = [read_all(daemon.address, name) for name in definitions]
    assert read[0] == read[1]
    written = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "daemon-0" / "index" / "unpacked").rglob("*.unpacked*")
    }
    assert len(written) == 2
    daemon.stop()
    daemon.restart()
    assert read_all(daemon.address, "packed") == read[1]
    assert {path: path.stat().st_mtime_ns for path in written} == written, (
        "what was unpacked is used again"
    )


def read_all(address: str, name: str) -> tuple[str, list[Any]]:
    with Loader(name, batch_size=8, seed=1, epochs=1, address=address) as loader:
        return loader.fingerprint, [
            {key: tensor.tolist() for key, tensor in batch.items()} for batch in loader
        ]


def test_shards_that_the_library_compresses_itself(gyred: StartDaemon, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "set", [TEXTS], ending=".tar.gz")
    assert sorted(sample_id for sample_id, _, _ in epoch(serve(gyred, folder)())) == list(range(50))


def test_compressed_shards_of_an_object_storage(
    gyred: StartDaemon, tmp_path: Path, s3_server: S3Server
) -> None:
    plain = write_shards(tmp_path / "plain", [TEXTS[:20], TEXTS[20:]])
    s3_server.make_bucket("packed")
    for path in plain.glob("*.tar"):
        s3_server.put("packed", f"set/{path.name}.gz", gzip.compress(path.read_bytes()))
    remote = {
        "uri": "s3://packed/set",
        "format": "webdataset",
        "storage": s3_server.storage_settings,
    }
    daemon = gyred(
        {"datasets": {"plain": {"uri": str(plain), "format": "webdataset"}, "remote": remote}}
    )
    assert read_all(daemon.address, "remote") == read_all(daemon.address, "plain")
    asked = s3_server.num_requests("GET", "/packed/set/")
    read_all(daemon.address, "remote")
    assert s3_server.num_requests("GET", "/packed/set/") == asked, "they are read from this machine"


def test_a_compressed_shard_that_changed_is_unpacked_again(
    gyred: StartDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_shards(tmp_path / "set", [TEXTS[:20], TEXTS[20:]], ending=".tar.gz")
    daemon = gyred({"datasets": {"set": {"uri": str(folder), "format": "webdataset"}}})
    before = read_all(daemon.address, "set")
    shutil.rmtree(folder)
    write_shards(folder, [TEXTS[20:40], TEXTS[20:]], ending=".tar.gz")
    assert read_all(daemon.address, "set") == before, "what is served is what was unpacked"
    assert main(["index", "set", "--address", daemon.address]) == 0
    assert "changed" in capsys.readouterr().out
    after = read_all(daemon.address, "set")
    assert after != before
    daemon.stop()
    daemon.restart()
    assert read_all(daemon.address, "set") == after
    assert len(list((tmp_path / "daemon-0" / "index" / "unpacked").rglob("*.unpacked*"))) == 2, (
        "what is outdated has gone"
    )


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data[:-200], r"shard-000\.tar\.gz cannot be unpacked: it is truncated"),
        (
            lambda data: data[:50] + bytes(50) + data[100:],
            "cannot be unpacked: it is no sound gzip file",
        ),
        (lambda data: data + b"more", "cannot be unpacked: it is no sound gzip file"),
        (lambda data: b"", "cannot be unpacked: it is empty"),
        (
            lambda data: gzip.compress(b"no tar at all" * 100),
            r"shard-000\.tar\.gz at byte \d+: it is no sound tar archive",
        ),
    ],
)
def test_damaged_compressed_shards(
    gyred: StartDaemon, tmp_path: Path, damage: Any, sentence: str
) -> None:
    folder = write_shards(tmp_path / "set", [TEXTS], ending=".tar.gz")
    shard = folder / "shard-000.tar.gz"
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(CorruptSample, match=sentence):
        serve(gyred, folder)()


def test_there_must_be_room_to_unpack(gyred: StartDaemon, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "set", [TEXTS], ending=".tar.gz")
    daemon = gyred(
        {"unpack_disk": "16KiB", "datasets": {"set": {"uri": str(folder), "format": "webdataset"}}}
    )
    with pytest.raises(
        Exception,
        match=r"no room to unpack shard shard-000\.tar\.gz: .* unpack_disk is 16384\. Raise it",
    ):
        Loader("set", batch_size=4, address=daemon.address, reattach_timeout_s=0.5)
    assert not list((tmp_path / "daemon-0" / "index" / "unpacked").rglob("*.unpacked*")), (
        "nothing unfinished is left"
    )


def test_the_same_shard_twice_is_refused(gyred: StartDaemon, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "set", [TEXTS])
    (folder / "shard-000.tar.gz").write_bytes(
        gzip.compress((folder / "shard-000.tar").read_bytes())
    )
    with pytest.raises(
        ValueError,
        match=r"has both shard-000\.tar\.gz and shard-000\.tar; name the ones you mean",
    ):
        serve(gyred, folder)()


def test_plain_and_compressed_shards_may_lie_together(gyred: StartDaemon, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "set", [TEXTS[:20], TEXTS[20:]])
    packed = folder / "shard-001.tar"
    (folder / "shard-001.tar.gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    assert sorted(sample_id for sample_id, _, _ in epoch(serve(gyred, folder)())) == list(range(50))


def test_a_member_that_is_a_gzip_file_is_data(gyred: StartDaemon, tmp_path: Path) -> None:
    stream = io.BytesIO(gzip.compress(b"payload"))
    folder = write_shards(tmp_path / "set", [[{"bin": stream.getvalue()}] * 2])
    for _, batch, place in epoch(serve(gyred, folder)()):
        assert gzip.decompress(ragged(batch, "bin", place).numpy().tobytes()) == b"payload"
