"""Micro-batches of a Loader, as torchtitan and Megatron-Core take them."""

from gyre_client import Loader
from gyre_client.integrations.micro_batches import MicroBatches

from tests.batches import SAMPLE_LENGTH


def test_a_state_loaded_inside_a_step_can_be_saved_at_once(numbers: str) -> None:
    with Loader("numbers", batch_size=10, address=numbers) as loader:
        batches = MicroBatches(loader, 5, SAMPLE_LENGTH - 1)
        state = batches.state_dict()
        first = next(batches.iterate(endless=True))
        batches.load_state_dict(state)
        assert batches.state_dict() == state
        again = next(batches.iterate(endless=True))
        assert again.tokens.tolist() == first.tokens.tolist()
