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


def test_samples_that_are_several_rows() -> None:
    batch = {
        "sample_id": torch.tensor([7, 3]),
        "mask": torch.tensor([True, False]),
        "tokens": torch.arange(8).reshape(4, 2),
        "document_id": torch.tensor([5, 6, 8, 9, 9]),
        "document_id.offsets": torch.tensor([0, 1, 3, 4, 5]),
    }
    found = [
        {name: tensor.tolist() for name, tensor in sample.items()} for sample in samples_of(batch)
    ]
    assert found == [
        {"sample_id": 7, "mask": True, "tokens": [0, 1], "document_id": [5]},
        {"sample_id": 7, "mask": True, "tokens": [2, 3], "document_id": [6, 8]},
        {"sample_id": 3, "mask": False, "tokens": [4, 5], "document_id": [9]},
        {"sample_id": 3, "mask": False, "tokens": [6, 7], "document_id": [9]},
    ]
