import numpy as np
import numpy.typing as npt
from gyre_trainer.training.records.shuffle import ShuffleCheck, ShuffleMonitor

BATCH = 50
Ids = npt.NDArray[np.int64]


def check(ids: Ids, epochs: Ids, num_samples: int) -> ShuffleCheck:
    watch = ShuffleMonitor(num_samples)
    for start in range(0, len(ids), BATCH):
        watch.add(ids[start : start + BATCH], epochs[start : start + BATCH])
    return watch.check()


def shuffled(num_samples: int, num_epochs: int) -> tuple[Ids, Ids]:
    generator = np.random.default_rng(7)
    ids = np.concatenate([generator.permutation(num_samples) for _ in range(num_epochs)])
    return ids, np.repeat(np.arange(num_epochs), num_samples)


def test_uniform_shuffles_pass_over_several_epochs_of_any_size() -> None:
    for num_samples in (10, 130, 5000):
        verdict = check(*shuffled(num_samples, 20), num_samples)
        assert verdict.passed, verdict
        assert verdict.num_samples == 20 * num_samples


def test_files_read_in_order_fail() -> None:
    verdict = check(np.arange(5000), np.zeros(5000, dtype=np.int64), 5000)
    assert not verdict.passed
    assert verdict.neighbour_correlation > 0.99


def test_a_shuffle_buffer_over_a_sequential_stream_fails() -> None:
    generator = np.random.default_rng(7)
    windows = [start + generator.permutation(500) for start in range(0, 5000, 500)]
    verdict = check(np.concatenate(windows), np.zeros(5000, dtype=np.int64), 5000)
    assert not verdict.passed


def test_an_id_that_comes_twice_in_an_epoch_fails_wherever_it_comes() -> None:
    for position in (1, BATCH, 4999):
        ids, epochs = shuffled(5000, 1)
        ids[position] = ids[0]
        verdict = check(ids, epochs, 5000)
        assert (verdict.num_repeats, verdict.passed) == (1, False)


def test_the_same_id_in_the_next_epoch_is_no_repeat() -> None:
    verdict = check(np.array([3, 1, 0, 2, 3, 0, 1, 2]), np.repeat([0, 1], 4), 4)
    assert verdict.num_repeats == 0
