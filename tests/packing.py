"""Documents of token ids, and what batches of packed sequences must say of them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tests.batches import Batch

Part = tuple[int, npt.NDArray[np.generic]]  # a document, and its ids
Documents = Sequence[npt.NDArray[np.integer]]


def documents(count: int, seed: int = 0, longest: int = 200) -> Documents:
    """Documents with the lengths of web text, some of them empty; ids from 1 on."""
    generator = np.random.default_rng(seed)
    lengths = np.minimum(generator.lognormal(3.5, 1.0, count).astype(int), longest)
    lengths[::97] = 0
    return [generator.integers(1, 30_000, length).astype(np.int32) for length in lengths]


def check_packed(batch: Batch, field: str, padding_id: int, least: int = 0) -> list[Part]:
    """Checks that the tensors of a packed batch agree.

    Args:
        batch: To check.
        field: That was packed; no document of one token is the padding id.
        padding_id: Fills what is left of a sequence.
        least: The least length that a sequence may have; that of a row if all have one.

    Returns:
        Each part of a document in it: its document and its ids.
    """
    ids = batch[field]
    num_rows, length = ids.shape
    ends, flat = batch["cu_seqlens"].tolist(), ids.reshape(-1)
    assert ends[0] == 0
    assert ends[-1] == num_rows * length
    owners = batch["document_id"].tolist()
    offsets = batch["document_id.offsets"].tolist()
    segments = batch["cu_seqlens.offsets"].tolist()
    position, counts = batch["position"].reshape(-1), batch["loss_mask"].reshape(-1)
    parts, number = [], 0
    for row in range(num_rows):
        assert number == segments[row]
        its = iter(owners[offsets[row] : offsets[row + 1]])
        while ends[number] < (row + 1) * length:
            begin, end = ends[number], ends[number + 1]
            assert torch.equal(position[begin:end], torch.arange(end - begin, dtype=torch.int32))
            number += 1
            if (flat[begin:end] == padding_id).all():
                assert not counts[begin:end].any()
                assert end % (least or length) == 0
                continue
            assert not counts[begin]
            assert counts[begin + 1 : end].all()
            parts.append((next(its), flat[begin:end].numpy()))
        assert ends[number] == (row + 1) * length
        assert next(its, None) is None
    assert segments[-1] == len(ends) == number + 1
    return parts


def joined(parts: list[Batch]) -> Batch:
    """A global batch of the parts of all ranks."""
    return {
        name: torch.cat([part[name] for part in parts])
        for name in parts[0]
        if not name.startswith("cu_seqlens") and not name.endswith(".offsets")
    }
