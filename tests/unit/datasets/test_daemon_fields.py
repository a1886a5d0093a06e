"""Which lists all have one length, and are served as arrays."""

from dataclasses import replace

import numpy as np
import pytest
from gyre_daemon.datasets import codecs
from gyre_daemon.datasets.codecs import with_lengths
from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.datasets.formats.sample_table import SampleTable
from gyre_daemon.errors import ConfigError

LIST = FieldSpec("x", np.dtype("<i4"), (), ragged=True, codec="bytes")
PAIRS = replace(LIST, shape=(2,))
CAST = replace(LIST, codec="cast", cast_from=("bytes", np.dtype("<i8")))


def lengths(spec: FieldSpec, sizes: list[int], ragged: tuple[str, ...] = ()) -> tuple[int, bool]:
    """The length that is found of samples with so many bytes; and whether they are an array."""
    table = np.array(sizes)[:, None]
    index = SampleTable([spec], [len(sizes)], np.cumsum(table, axis=0), table, identity=b"")
    (found,) = with_lengths(index, index.fields, ["x"], ragged)
    assert found == spec
    return found.length, not found.served.ragged


@pytest.mark.parametrize("spec", [LIST, PAIRS, CAST])
def test_lists_of_one_length_know_it(spec: FieldSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_AT_ONCE", 2)
    length = 6 // int(np.prod(spec.shape))
    for count in (1, 2, 5):
        assert lengths(spec, [24] * count) == (length, True)
        assert lengths(spec, [24] * count + [16]) == (0, False)
    assert replace(spec, length=length).served.shape == (length, *spec.shape)
    assert lengths(spec, [0, 0]) == (0, False)
    assert lengths(spec, [24, 24], ("x",)) == (0, False)
    with pytest.raises(ConfigError, match="`lengths` has 'y', and there is no such field"):
        lengths(spec, [24], ("y",))


@pytest.mark.parametrize(
    "spec",
    [
        replace(LIST, dtype=np.dtype(np.uint8)),
        replace(LIST, dtype=np.dtype(np.uint8), codec="text"),
        replace(LIST, codec="npy"),
        replace(LIST, token_ids=True),
        replace(LIST, codec="ids", vocabulary=9),
    ],
)
def test_bytes_text_arrays_and_documents_stay_ragged(spec: FieldSpec) -> None:
    assert lengths(spec, [24, 24]) == (0, False)
