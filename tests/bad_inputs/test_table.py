"""The table as a whole."""

from tests.bad_inputs.table import (
    commands,
    configuration,
    credentials,
    cursors,
    links,
    python_calls,
    requests,
    shards,
    sidecars,
    sockets,
    users,
)

ROWS = [
    *requests.ROWS,
    *requests.HARMLESS_ROWS,
    *cursors.ROWS,
    *cursors.LOCATED,
    *sockets.GRPC_ROWS,
    *sockets.SIDE_ROWS,
    *sockets.MALFORMED_ROWS,
    *credentials.ROWS,
    *users.ROWS,
    *users.HARMLESS_ROWS,
    *links.ROWS,
    *shards.ROWS,
    *sidecars.ROWS,
    *configuration.ROWS,
    *python_calls.ROWS,
    *python_calls.STATE_ROWS,
    *commands.ROWS,
]


def test_every_row_has_a_name_of_its_own_and_there_are_many() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS)
    assert len(ROWS) >= 300
