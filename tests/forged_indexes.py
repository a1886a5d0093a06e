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
    array.flat[at] = value
    return array


def lacking(sample: int) -> np.ndarray:
    sizes = SCAN["size"].copy()
    sizes[sample] = -1
    return sizes


FORGED: dict[str, dict[str, Any]] = {
    "negative start": {"start": changed("start", 2, -512)},
    "start in the header of the archive": {"start": changed("start", 0, 0)},
    "start beyond the shard": {"start": changed("start", -1, 1 << 40)},
    "start near the end of int64": {"start": changed("start", -1, (1 << 63) - 1)},
    "negative size": {"size": changed("size", 1, -2)},
    "size beyond the shard": {"size": changed("size", -1, len(TAR))},
    "size near the end of int64": {"size": changed("size", -1, (1 << 63) - 1)},
    "overlapping members": {"size": changed("size", 0, 4096)},
    "decreasing starts": {"start": SCAN["start"][::-1].copy()},
    "one start too few": {"start": SCAN["start"][1:]},
    "one size too many": {"size": np.vstack((SCAN["size"], SCAN["size"][:1]))},
    "a sample without members": {"size": lacking(1)},
    "one shape too few": {"shape": SCAN["shape"][:-1]},
    "a dim too many": {"shape": np.hstack((SCAN["shape"], SCAN["shape"][:, :1]))},
    "negative shape": {"shape": changed("shape", 0, -1)},
    "huge shape": {"shape": changed("shape", 0, 1 << 62)},
    "shape larger than its member": {"shape": changed("shape", 0, 1 << 20)},
    "meta is no JSON": {"meta": np.frombuffer(b"{", np.uint8)},
    "meta is deep": {"meta": np.frombuffer(b"[" * 100_000, np.uint8)},
    "meta is a list": {"meta": np.frombuffer(b"[]", np.uint8)},
    "meta has another key": {"meta": meta(more=1)},
    "meta is huge": {"meta": np.full(5 << 20, ord(" "), np.uint8)},
    "extensions are numbers": {"meta": meta(extensions=[1, 2, 3])},
    "an extension is empty": {"meta": meta(extensions=["cls", "npy", ""])},
    "extensions are equal": {"meta": meta(extensions=["cls", "cls", "txt"])},
    "an extension too few": {"meta": meta(extensions=["cls", "npy"])},
    "kinds are a number": {"meta": meta(kinds=5)},
    "arrays are missing": {"meta": meta(arrays={})},
    "arrays of text": {"meta": meta(arrays={"txt": ["<f8", 2, 0, "a"]})},
    "arrays of an unknown type": {"meta": meta(arrays={"npy": ["O", 2, 0, "a"]})},
    "arrays of more dims": {"meta": meta(arrays={"npy": ["<f8", 9, 0, "a"]})},
    "starts of another dtype": {"start": SCAN["start"].astype(np.int32)},
    "starts in one dim": {"start": SCAN["start"].ravel()},
}
