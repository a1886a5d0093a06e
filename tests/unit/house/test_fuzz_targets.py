"""The corpora of the fuzz targets, and some mutations of each input, find no fault."""

import random
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"
NUM_MUTATIONS = 20


def mutated(data: bytes, chance: random.Random) -> bytes:
    """A copy with some bytes changed, cut out, repeated or inserted."""
    result = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(result))
        match chance.randint(0, 4):
            case 0 if at < len(result):
                result[at] ^= 1 << chance.randint(0, 7)
            case 1 if at < len(result):
                result[at] = chance.choice(b"\0\xff0-9[{\"'<\n")
            case 2:
                del result[at : at + chance.randint(1, 600)]
            case 3:
                result[at:at] = result[at : at + chance.randint(1, 600)]
            case _:
                result[at:at] = chance.randbytes(chance.randint(1, 8))
    return bytes(result)


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_finds_no_fault(name: str) -> None:
    inputs = sorted((CORPUS / name).iterdir())
    assert inputs
    chance = random.Random(name)
    for path in inputs:
        data = path.read_bytes()
        TARGETS[name](data)
        for _ in range(NUM_MUTATIONS):
            TARGETS[name](mutated(data, chance))


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_and_noise_find_no_fault(name: str) -> None:
    chance = random.Random(name)
    for length in (0, 1, 8, 512, 5000):
        TARGETS[name](chance.randbytes(length))
