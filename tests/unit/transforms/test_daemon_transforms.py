"""Chains of transforms, and the random numbers of samples, without processes."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from gyre_daemon.order.planner import BatchPlanner, Order
from gyre_daemon.transforms import Field, Sample, Transform
from gyre_daemon.transforms.built_in import CropOrPad, Truncate
from gyre_daemon.transforms.worker import Chain, SampleGenerators, TransformFailed

BYTES = Field(np.dtype(np.uint8), (None,))
SOURCE = {"text": BYTES, "label": Field(np.dtype(np.int64), ())}


@dataclass(frozen=True)
class Doubled(Transform):
    """Makes `twice` of `field`, which it may drop."""

    field: str = "text"
    is_dropped: bool = False

    @property
    def inputs(self) -> Sequence[str]:
        return [self.field]

    @property
    def drops(self) -> Sequence[str]:
        return [self.field] if self.is_dropped else []

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        return {"twice": fields[self.field]}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        self.put("twice", np.concatenate([sample[self.field]] * 2), sample, out)


def test_a_chain_hands_results_on_and_writes_the_last_into_the_batch() -> None:
    steps = [("double", Doubled(is_dropped=True)), ("crop", CropOrPad("twice", 5, value=9))]
    chain = Chain(steps, SOURCE)
    assert chain.made == {"twice": Field(np.dtype(np.uint8), (5,))}
    assert (chain.passed, chain.read, chain.cost) == (["label"], ["text"], "heavy")
    generator = np.random.default_rng(0)
    for text, wanted in ((b"abc", b"abcab"), (b"ab", b"abab\x09"), (b"", b"\x09" * 5)):
        out = np.empty(5, np.uint8)
        chain.apply({"text": np.frombuffer(text, np.uint8)}, generator, {"twice": out})
        assert out.tobytes() == wanted


MASKED = SOURCE | {"mask": Field(np.dtype(np.bool_), (None,))}


@pytest.mark.parametrize("kind", [Truncate, CropOrPad])
def test_a_mask_is_cut_at_random_where_its_sequence_is(kind: type[Truncate]) -> None:
    chain = Chain([("cut", kind("text", 4, start="random", masks=("mask",)))], MASKED)
    sample = {"text": np.arange(100, dtype=np.uint8), "mask": np.arange(100) % 3 == 0}
    out = {} if kind is Truncate else {"text": np.empty(4, np.uint8), "mask": np.empty(4, np.bool_)}
    for seed in range(9):
        made = dict(sample)
        chain.apply(made, np.random.default_rng(seed), out)
        text, mask = (out.get(name, made[name]) for name in ("text", "mask"))
        assert np.array_equal(mask, text % 3 == 0)
    with pytest.raises(TransformFailed, match="'mask' has 99 elements, and 'text' has 100"):
        chain.apply({**sample, "mask": sample["mask"][1:]}, np.random.default_rng(0), dict(out))


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (["text"], "the mask 'mask' would not be cut with 'text'"),
        (["mask", "text"], "'mask' is a mask, and would be cut elsewhere than its sequence"),
    ],
)
@pytest.mark.parametrize("kind", [Truncate, CropOrPad])
def test_a_mask_that_is_not_cut_with_its_sequence_is_refused(
    kind: type[Truncate], steps: list[str], reason: str
) -> None:
    cuts = [("cut", kind(name, 4, start="random")) for name in steps]
    with pytest.raises(ValueError, match=reason):
        Chain(cuts, MASKED)


def test_a_chain_may_end_with_fields_of_many_lengths() -> None:
    chain = Chain([("double", Doubled())], SOURCE)
    assert chain.ragged == ["twice"]
    assert chain.scratch() == {}
    sample = {"text": np.frombuffer(b"abc", np.uint8)}
    chain.apply(sample, np.random.default_rng(0), {})
    assert [each.tobytes() for each in chain.made_ragged(sample)] == [b"abcabc"]
    with pytest.raises(TransformFailed, match=r"double: it makes the shape \[2, 2\] for 'twice'"):
        chain.made_ragged({"twice": np.zeros((2, 2))})
    with pytest.raises(TransformFailed, match="double: it makes nothing for 'twice'"):
        chain.made_ragged({})


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([("a", Doubled("jpg"))], r"transforms\[0\] \(a\) needs the field 'jpg'; there are text"),
        ([("a", Doubled(is_dropped=True)), ("b", CropOrPad("text", 3))], "needs the field 'text'"),
        ([("a", CropOrPad("label", 3))], r"transforms\[0\] \(a\): 'label' is one number"),
        ([("a", CropOrPad("text", 3, value=300))], "value is 300, which is no uint8"),
    ],
)
def test_chains_that_do_not_fit_are_refused(
    steps: Sequence[tuple[str, Transform]], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Chain(steps, SOURCE)


def test_a_transform_that_fails_is_named() -> None:
    chain = Chain([("double", Doubled()), ("crop", CropOrPad("twice", 4))], SOURCE)
    with pytest.raises(TransformFailed, match="double: KeyError: 'text'"):
        chain.apply({}, np.random.default_rng(0), {"twice": np.empty(4, np.uint8)})


def test_a_generator_that_is_seeded_again_is_as_a_new_one() -> None:
    generators = SampleGenerators()
    for seed, epoch, sample in ((0, 0, 0), (2**64 - 1, 7, 2**62), (3, 1, 5)):
        key = hashlib.blake2b(struct.pack("<3Q", seed, epoch, sample), digest_size=16).digest()
        fresh = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        again = generators.of(seed, epoch, sample)
        for draw in ("random", "integers32", "standard_normal"):
            if draw == "integers32":  # half a word is kept for the next draw
                assert again.integers(1 << 16, dtype=np.uint32) == fresh.integers(
                    1 << 16, dtype=np.uint32
                )
            else:
                assert getattr(again, draw)() == getattr(fresh, draw)()


@pytest.mark.parametrize("tail", ["wrap", "drop", "pad"])
def test_epochs_are_those_of_the_positions(tail: str) -> None:
    order = Order("full", tail, 1, 6)  # type: ignore[arg-type]
    planner = BatchPlanner(order, 13)
    positions = np.arange(6 * 9).reshape(9, 6)
    wanted = positions // planner.epoch_length
    for world_size in (1, 2, 3):
        parts = [planner.epochs(2, 7, rank, world_size) for rank in range(world_size)]
        assert np.array_equal(np.concatenate(parts, axis=1), wanted[2:])
