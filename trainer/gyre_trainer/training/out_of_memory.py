"""What a rank says that ran out of memory: how much it asked for, and what to change."""

import errno
import re

_CPU = re.compile(r"you tried to allocate (\d+) bytes")
_CUDA = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)")
_TORCH_WORDS = ("can't allocate memory", "out of memory", "not enough memory")
_TORCH_ERROR = "OutOfMemoryError"  # of torch, which is not imported only to be told from others


def explained(error: BaseException) -> str:
    """One sentence about an error; empty if it is not about memory."""
    if not _is_about_memory(error):
        return ""
    return (
        f"memory ran out{_asked_for(str(error))}; use more ranks, make `data.batch_size` or "
        "`data.sequence_length` smaller or `optimizer.accumulation_steps` larger, or set "
        '`memory.recompute = "layer"`; `gyre-train plan CONFIG` shows what a step needs'
    )


def _is_about_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == _TORCH_ERROR:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _TORCH_WORDS)


def _asked_for(text: str) -> str:
    if found := _CPU.search(text):
        return f": {int(found[1]) / 2**30:,.2f} GiB more were asked for"
    found = _CUDA.search(text)
    return f": {found[1]} more were asked for" if found else ""
