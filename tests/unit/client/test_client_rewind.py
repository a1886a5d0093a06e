"""What `gyre rewind` takes from records that are odd."""

import pytest
from gyre_client.page.training_run import RunFiles


@pytest.mark.parametrize(
    ("loss", "found"), [(2, 2.0), (1.5, 1.5), (10**400, None), ("low", None), (None, None)]
)
def test_a_loss_that_is_no_float_is_left_out(loss: object, found: float | None) -> None:
    assert RunFiles(b"", history={1: {"loss": loss}}).loss(1) == found
