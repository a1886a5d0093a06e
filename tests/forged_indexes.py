"""Stored indexes of a tar shard, each with arrays that no scan of it finds."""

import io
import json
import tarfile
from typing import Any

import numpy as np
from gyre_daemon.datasets.formats.webdataset import WebdatasetFormat, WebdatasetOptions

FORMAT = WebdatasetFormat(WebdatasetOptions())


def npy(values: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(values))
    return buffer.getvalue()


def tar_of_samples() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number in range(4):
            files = {
                "cls": str(number).encode(),
                "npy": npy(np.zeros((number + 1, 3))),
                "txt": b"text",
            }
            for extension, data in files.items():
                info = tarfile.TarInfo(f"{number}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


TAR = tar_of_samples()
SCAN = FORMAT.inspection.run("a.tar", io.BytesIO(TAR))


def meta(**changes: Any) -> np.ndarray:
    text = json.dumps({**json.loads(SCAN["meta"].tobytes()), **changes})
    return np.frombuffer(text.encode(), np.uint8)


def changed(name: str, at: int, value: int) -> np.ndarray:
    array = SCAN[name].copy()
    array[at] = value
    return array


FORGED: dict[str, dict[str, Any]] = {
    "negative start": {"start": changed("start", 2, -512)},
    "start in the header of the archive": {"start": changed("start", 0, 0)},
    "start beyond the shard": {"start": changed("start", -1, 1 << 40)},
    "start near the end of int64": {"start": changed("start", -1, (1 << 63) - 1)},
    "negative size": {"size": changed("size", 1, -1)},
    "size beyond the shard": {"size": changed("size", -1, len(TAR))},
    "size near the end of int64": {"size": changed("size", -1, (1 << 63) - 1)},
    "overlapping members": {"size": changed("size", 0, 4096)},
    "decreasing starts": {"start": SCAN["start"][::-1].copy()},
    "one start too few": {"start": SCAN["start"][1:]},
    "one size too many": {"size": np.append(SCAN["size"], 0)},
    "no samples": {"first": np.zeros(1, np.int64)},
    "empty first": {"first": np.zeros(0, np.int64)},
    "first does not begin at 0": {"first": changed("first", 0, 1)},
    "first decreases": {"first": changed("first", 1, 100)},
    "first ends elsewhere": {"first": changed("first", -1, 3)},
    "negative extension": {"extension": changed("extension", 0, -1)},
    "unknown extension": {"extension": changed("extension", 0, 50)},
    "an extension twice": {"extension": changed("extension", 0, 1)},
    "arrays beyond the members": {"array": changed("array", -1, 1000)},
    "negative array": {"array": changed("array", 0, -1)},
    "arrays missing": {"array": SCAN["array"][:-1], "itemsize": SCAN["itemsize"][:-1]},
    "an array that is text": {"array": changed("array", 0, 2)},
    "dims beyond the shapes": {"dim": changed("dim", -1, 100)},
    "dims decrease": {"dim": changed("dim", 1, 7)},
    "negative shape": {"shape": changed("shape", 0, -1)},
    "huge shape": {"shape": changed("shape", 0, 1 << 62)},
    "shape larger than its member": {"shape": changed("shape", 0, 1 << 20)},
    "itemsize 0": {"itemsize": changed("itemsize", 0, 0)},
    "itemsize of another type": {"itemsize": changed("itemsize", 0, 4)},
    "meta is no JSON": {"meta": np.frombuffer(b"{", np.uint8)},
    "meta is deep": {"meta": np.frombuffer(b"[" * 100_000, np.uint8)},
    "meta is a list": {"meta": np.frombuffer(b"[]", np.uint8)},
    "meta has another key": {"meta": meta(more=1)},
    "meta is huge": {"meta": np.full(5 << 20, ord(" "), np.uint8)},
    "extensions are numbers": {"meta": meta(extensions=[1, 2, 3])},
    "an extension is empty": {"meta": meta(extensions=["cls", "npy", ""])},
    "extensions are equal": {"meta": meta(extensions=["cls", "cls", "txt"])},
    "extensions of other kinds": {"meta": meta(extensions=["cls", "txt", "npy"])},
    "kinds are missing": {"meta": meta(kinds=[])},
    "a kind of an unknown extension": {"meta": meta(kinds=[[[0, 1, 9], 0, 0, "a"]])},
    "arrays of an unknown type": {"meta": meta(arrays=[["npy", "O", 2, 0, "a"]])},
    "arrays of more dims": {"meta": meta(arrays=[["npy", "<f8", 9, 0, "a"]])},
    "starts of another dtype": {"start": SCAN["start"].astype(np.int32)},
    "starts in two dims": {"start": SCAN["start"].reshape(-1, 1)},
}
