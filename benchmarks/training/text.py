"""Text to learn: the interpreter's own library as bytes, file after file.

Neighbouring samples come from one module, and so from one topic.
"""

import sysconfig
import zlib
from pathlib import Path

HELD_OUT_OF = 16  # one file in so many, by its name
_OTHERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def library_text(*, held_out: bool, max_bytes: int) -> bytes:
    """The sources of the library in the order of their paths.

    Those to train on, or those to test with.

    Args:
        held_out: the one or the other.
        max_bytes: no more than these.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts, num_bytes = [], 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        is_held_out = zlib.crc32(name.as_posix().encode()) % HELD_OUT_OF == 0
        if is_held_out == held_out and not _OTHERS & set(name.parts):
            parts.append(path.read_bytes())
            num_bytes += len(parts[-1])
            if num_bytes >= max_bytes:
                break
    return b"".join(parts)[:max_bytes]
