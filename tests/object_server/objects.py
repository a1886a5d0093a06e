"""What the server has: objects by path, `/bucket/key`."""

import hashlib
import mmap
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

_PAGE_KEYS = 1000


@dataclass(frozen=True, slots=True)
class Stored:
    """One object.

    Attributes:
        data: its bytes.
        etag: quoted.
        modified: in seconds since 1970.
        version: a number that counts the objects that were put.
    """

    data: memoryview
    etag: str
    modified: int
    version: int = 0


class Objects:
    """Objects by path."""

    def __init__(self) -> None:
        self._stored: dict[str, Stored] = {}
        self._started_at, self._num_put = int(time.time()), 0

    def get(self, path: str) -> Stored | None:
        return self._stored.get(path)

    def put(self, path: str, data: bytes) -> None:
        """Store an object, a second later by the server's clock than the one before."""
        self._num_put += 1
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        modified = self._started_at + self._num_put
        self._stored[path] = Stored(memoryview(data), etag, modified, self._num_put)

    def delete(self, path: str) -> None:
        self._stored.pop(path, None)

    def map_folder(self, root: Path) -> None:
        """Every file below a folder is an object; the first level of folders are the buckets."""
        for file in sorted(path for path in root.rglob("*") if path.is_file()):
            with file.open("rb") as opened:
                empty = file.stat().st_size == 0
                data = memoryview(
                    b"" if empty else mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
                )
            etag = f'"{file.stat().st_mtime_ns:x}-{len(data):x}"'
            self._stored[f"/{file.relative_to(root)}"] = Stored(data, etag, self._started_at)

    def list_bucket(self, bucket: str, query: str, tells: Collection[str]) -> bytes:
        """One page of ListObjectsV2, which tells the `etag` of objects, or leaves it out."""
        wanted = {key: values[0] for key, values in parse_qs(query, keep_blank_values=True).items()}
        prefix, delimiter = wanted.get("prefix", ""), wanted.get("delimiter", "")
        after = wanted.get("continuation-token", wanted.get("start-after", ""))
        keys, folders = self._names(bucket, prefix, delimiter)
        names = sorted(name for name in [*keys, *folders] if name > after)
        page = names[: int(wanted.get("max-keys", _PAGE_KEYS))]
        more = len(page) < len(names)
        entries = [
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            if name in folders
            else _entry(name, keys[name], tells)
            for name in page
        ]
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(entries)}</ListBucketResult>"
        ).encode()

    def _names(
        self, bucket: str, prefix: str, delimiter: str
    ) -> tuple[dict[str, Stored], set[str]]:
        keys, folders = {}, set()
        for path, stored in self._stored.items():
            key = path.removeprefix(f"/{bucket}/")
            if key == path or not key.startswith(prefix):
                continue
            rest, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if found:
                folders.add(f"{prefix}{rest}{delimiter}")
            else:
                keys[key] = stored
        return keys, folders


def _entry(key: str, stored: Stored, tells: Collection[str]) -> str:
    seconds = stored.modified if "modified" in tells else 0  # it cannot be left out
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))
    etag = f"<ETag>{escape(stored.etag)}</ETag>" if "etag" in tells else ""
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified>{etag}"
        f"<Size>{len(stored.data)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )
