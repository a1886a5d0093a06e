"""Samples of a batch, as a framework that collates by itself wants them."""

import torch
from gyre_client.loader.interop import samples_of


def test_samples_of_plain_and_ragged_fields() -> None:
    batch = {
        "sample_id": torch.tensor([7, 3, 5]),
        "tokens": torch.arange(6).reshape(3, 2),
        "txt": torch.tensor([1, 2, 3, 4], dtype=torch.uint8),
        "txt.offsets": torch.tensor([0, 2, 2, 4]),
    }
    found = [
        {name: tensor.tolist() for name, tensor in sample.items()} for sample in samples_of(batch)
    ]
    assert found == [
        {"sample_id": 7, "tokens": [0, 1], "txt": [1, 2]},
        {"sample_id": 3, "tokens": [2, 3], "txt": []},
        {"sample_id": 5, "tokens": [4, 5], "txt": [3, 4]},
    ]
    assert samples_of({"txt": torch.arange(3), "txt.offsets": torch.tensor([0, 3])})[0][
        "txt"
    ].tolist() == [0, 1, 2]
