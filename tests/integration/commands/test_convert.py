"""`gyre convert`: what each format's own writer wrote equals the source, sample by sample."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gyre_client import Loader, texts
from gyre_client.command.cli import main
from gyre_client.command.conversion import OutputFile
from tokenizers import Tokenizer

from tests.probe_transforms import Blown
from tests.tokenizers import make_tokenizer

pytestmark = pytest.mark.usefixtures("private_daemon")

NUM_SAMPLES = 53


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    generator = np.random.default_rng(0)
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(shard * 30, min(NUM_SAMPLES, shard * 30 + 30)):
                array = io.BytesIO()
                np.save(array, generator.random((2, 3), np.float32))
                members = {
                    "bin": generator.bytes(number),
                    "txt": ("wörd " * number).encode(),
                    "json": json.dumps({"n": number}).encode(),
                    "cls": b"%d" % (number - 9),
                    "vec.npy": array.getvalue(),
                }
                for extension, data in members.items():
                    member = tarfile.TarInfo(f"{number:04}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return folder


def samples(folder: Path, **more: Any) -> list[dict[str, Any]]:
    """All samples in the order of their ids."""
    found = []
    with Loader(folder, batch_size=10, order="sequential", tail="pad", **more) as loader:
        for batch in loader:
            ragged = {name.removesuffix(".offsets") for name in batch if name.endswith(".offsets")}
            names = ragged | (batch.keys() - {f"{name}.offsets" for name in ragged})
            for row in torch.nonzero(batch["mask"]).ravel().tolist():
                sample = {}
                for name in names - {"mask"}:
                    first, stop = row, row + 1
                    if name in ragged:
                        first, stop = batch[f"{name}.offsets"][row : row + 2].tolist()
                    sample[name] = batch[name][first:stop].numpy().tobytes()
                found.append(sample)
    return found


def convert(source: Path, target: Path, kind: str, *more: str) -> int:
    return main(["convert", str(source), str(target), "--to", kind, *more])


@pytest.mark.parametrize("kind", ["webdataset", "mds", "parquet"])
def test_a_converted_dataset_has_the_same_samples(
    kind: str, tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "100% new" / kind
    assert convert(tars, target, kind, "--samples-per-shard", "20", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["num_samples"] == NUM_SAMPLES
    assert said["num_files"] == (4 if kind == "mds" else 3)
    assert samples(target) == samples(tars)
    assert [path.name for path in target.parent.iterdir()] == [kind], "nothing is left beside it"
    assert convert(tars, target, kind) == 2
    assert "exists already" in capsys.readouterr().err


def test_rows_with_gaps_and_lists_stay_as_they_are(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": np.arange(30, dtype=np.int16),
            "text": [None if row % 7 == 0 else f"row {row}" for row in range(30)],
            "ids": pa.array([list(range(row % 5)) for row in range(30)], pa.list_(pa.int32())),
            "pair": pa.array([[row, row / 2] for row in range(30)], pa.list_(pa.float32(), 2)),
        }
    )
    (tmp_path / "rows").mkdir()
    pq.write_table(table, tmp_path / "rows/a.parquet", row_group_size=7)
    assert convert(tmp_path / "rows", tmp_path / "copy", "parquet") == 0
    assert pq.read_table(tmp_path / "copy").to_pylist() == table.to_pylist()
    assert convert(tmp_path / "rows", tmp_path / "tars", "webdataset", "--column", "text") == 0
    with tarfile.open(tmp_path / "tars/000000.tar") as archive:
        assert archive.getnames() == [f"{row:09d}.text" for row in range(30) if row % 7]


def test_token_files_have_the_ids_back_to_back(
    token_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--option", "dtype=uint16", "--option", "sequence_length=100")
    assert convert(token_files, tmp_path / "new", "tokens", *options) == 0
    (path,) = (tmp_path / "new").iterdir()
    ids = np.arange(3003, dtype="<u2")
    assert path.read_bytes() == np.concatenate((ids[:1700], ids[1703:3003])).tobytes()
    capsys.readouterr()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_lists_of_ids_become_token_files_row_by_row(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compared with what the source's own reader says of each row."""
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, 50_000, row % 9).tolist() for row in range(NUM_SAMPLES)]
    (tmp_path / "rows").mkdir()
    options = ["--option", "columns=['ids']"]
    if kind == "parquet":
        table = pa.table({"ids": pa.array(ids, pa.list_(pa.uint16())), "other": ids})
        pq.write_table(table, tmp_path / "rows/a.parquet", row_group_size=7)
        rows = pq.read_table(tmp_path / "rows/a.parquet")["ids"].to_pylist()
    else:
        lines = [json.dumps({"ids": its, "other": "x"}) for its in ids]
        (tmp_path / "rows/a.jsonl").write_text("\n".join(lines))
        rows = [json.loads(line)["ids"] for line in lines]
        options += ["--option", "cast={ids='uint16'}"]
    target = tmp_path / "tokens"
    assert convert(tmp_path / "rows", target, "tokens", "--samples-per-shard", "20", *options) == 0
    files = sorted(target.iterdir())
    assert len(files) == 3
    for number, path in enumerate(files):
        found, begin = np.fromfile(path, "<u2"), 0
        for row in rows[number * 20 : number * 20 + 20]:
            assert found[begin : begin + len(row)].tolist() == row
            begin += len(row)
        assert begin == len(found)
    capsys.readouterr()


def corpus(folder: Path, texts: list[str]) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


TEXTS = [f"the cat number {number} sat on {'the ' * (number % 9)}mat" for number in range(70)]


def test_raw_text_becomes_token_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The format is the folder's name; compared with what the tokenizer's library says."""
    path, tokenizer = corpus(tmp_path, TEXTS), make_tokenizer(tmp_path / "tokenizer.json")
    library = Tokenizer.from_file(str(tokenizer))
    tokenize = ["--transform", "tokenize", "field=json", "key=text", f"tokenizer={tokenizer}"]
    options = ["--json", "--samples-per-shard", "16", "--dtype", "uint16"]
    command = ["convert", str(path), str(tmp_path / "tokens"), *options, *tokenize, "end=1"]
    assert main(command) == 0
    said = json.loads(capsys.readouterr().out)
    wanted = [[*library.encode(text).ids, 1] for text in TEXTS]
    assert said["num_tokens"] == sum(map(len, wanted))
    files = sorted((tmp_path / "tokens").iterdir())
    assert [path.name for path in files] == [f"{number:06}.bin" for number in range(5)]
    for number, file in enumerate(files):
        ids = [each for its in wanted[16 * number : 16 * number + 16] for each in its]
        assert np.fromfile(file, "<u2").tolist() == ids
    large = ["convert", str(path), str(tmp_path / "new"), "--to", "tokens", "--dtype", "uint16"]
    assert main([*large, *tokenize, "end=70000"]) == 2
    assert "--dtype uint16: an id is 70000" in capsys.readouterr().err
    assert not (tmp_path / ".new.unfinished").exists()


def test_samples_longer_than_their_room_and_fields_that_pass_are_whole(tmp_path: Path) -> None:
    """Several fields, some of which have to be made a second time."""
    path = corpus(tmp_path, TEXTS)
    name = f"{Blown.__module__}:{Blown.__name__}"
    more = ["--to", "parquet", "--transform", name, "field=json", "factor=3000"]
    assert main(["convert", str(path), str(tmp_path / "rows"), *more]) == 0
    rows = pq.read_table(tmp_path / "rows").to_pylist()
    for number, (row, line) in enumerate(zip(rows, path.read_text().splitlines(), strict=True)):
        assert row["json"] == line
        assert row["size"] == len(line)
        assert row["blown"] == [*range(len(line))] * (3000 if number % 7 == 3 else 1)


class Interrupted(Exception):
    """In place of whatever ends a command in the middle."""


def test_the_same_command_goes_on_and_another_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended after its third part; a corrupt sample ends another one, which goes on, too."""
    path = corpus(tmp_path, TEXTS)
    command = ["convert", str(path), str(tmp_path / "new"), "--samples-per-shard", "10"]
    run, ended = OutputFile.run, list[int]()

    def counted(part: OutputFile, connection: Any, advance: Any) -> dict[str, Any]:
        if len(ended) >= 3:  # two parts run at once
            raise Interrupted
        found = run(part, connection, advance)
        ended.append(part.number)
        return found

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(OutputFile, "run", counted)
        main([*command, "--to", "webdataset"])
    unfinished = tmp_path / ".new.unfinished"
    kept = {each.name: each.stat().st_mtime_ns for each in (unfinished / "files").iterdir()}
    assert len(kept) >= 3
    assert not (tmp_path / "new").exists()
    capsys.readouterr()
    assert main([*command, "--to", "parquet"]) == 2
    error = capsys.readouterr().err
    assert "differs in: format" in error
    assert main([*command, "--to", "webdataset"]) == 0
    assert len(list((tmp_path / "new").iterdir())) == 7
    for name, written_ns in kept.items():
        assert (tmp_path / "new" / name).stat().st_mtime_ns == written_ns
    command[2] = str(tmp_path / "all")
    assert main([*command, "--to", "webdataset"]) == 0
    both = [
        {each.name: each.read_bytes() for each in (tmp_path / name).iterdir()}
        for name in ("new", "all")
    ]
    assert both[0] == both[1]
    assert not unfinished.exists()


@pytest.mark.parametrize(
    ("kind", "more", "sentence"),
    [
        ("tokens", (), "one column of integers"),
        ("tokens", ("--column", "txt"), "one column of integers"),
        ("parquet", ("--column", "nothing"), "there is no column 'nothing'"),
        ("webdataset", ("--samples-per-shard", "0"), "samples-per-shard"),
        ("parquet", ("--dtype", "uint16"), "only token files take one"),
        ("parquet", ("--transform", "cast", "txt"), "'txt' is not KEY=VALUE"),
        ("parquet", ("--engine", "spark"), "no engine is 'spark'"),
    ],
)
def test_what_cannot_be_written_is_refused(
    kind: str,
    more: tuple[str, ...],
    sentence: str,
    tars: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert convert(tars, tmp_path / "new", kind, *more) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_where_a_sample_is_corrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines").mkdir()
    lines = "".join(f'{{"n": {row}}}\n' for row in range(3000)) + "{\n"
    (tmp_path / "lines/a.jsonl").write_text(lines)
    assert convert(tmp_path / "lines", tmp_path / "new", "parquet") == 1
    assert "sample 3000" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["lines"]


def test_tar_members_with_names_that_readers_decode_keep_their_values(tmp_path: Path) -> None:
    """Gyre and webdataset read `.id` and `.index` as whole numbers, and `.npy` as an array."""
    values = {
        "id": pa.array(["a1", "b2", "c3"]),
        "index": pa.array([0.25, 1.5, -2.75]),
        "cls": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2)),
        "cls2": pa.array([7, -8, 9]),
        "npy": pa.array([b"x", b"yy", b"zzz"]),
    }
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table(values), tmp_path / "rows/a.parquet")
    assert convert(tmp_path / "rows", tmp_path / "tars", "webdataset") == 0
    with Loader(tmp_path / "tars", batch_size=3, order="sequential", format="webdataset") as loader:
        batch = next(loader)
    assert texts(batch, "id.txt") == ["a1", "b2", "c3"]
    assert batch["index.npy"].tolist() == [0.25, 1.5, -2.75]
    assert batch["cls.npy"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert batch["cls2"].tolist() == [7, -8, 9]
    assert bytes(batch["npy.bin"].tolist()) == b"xyyzzz"


def test_columns_that_a_tar_writer_would_leave_out_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table({"_id": [1], "x": [2]}), tmp_path / "rows/a.parquet")
    assert convert(tmp_path / "rows", tmp_path / "tars", "webdataset") == 2
    assert "cannot have members with the extensions _id" in capsys.readouterr().err
    assert not (tmp_path / "tars").exists()


def test_a_command_that_was_ended_at_the_index_of_all_files_goes_on(
    tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "mds", Path.rename

    def interrupted(path: Path, to: Path) -> Path:
        if to == target:
            raise Interrupted
        return rename(path, to)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Path, "rename", interrupted)
        convert(tars, target, "mds")
    unfinished = tmp_path / ".mds.unfinished/files"
    assert (unfinished / "index.json").exists()
    (unfinished / ".index.json.0123").touch()  # an index that was being written
    assert convert(tars, target, "mds") == 0
    assert sorted(path.name for path in target.iterdir()) == ["index.json", "shard.00000.mds"]
    assert samples(target) == samples(tars)
    capsys.readouterr()
