"""Credentials over TLS. `sent` is the `authorization` of a call, or None for a call without one.

There are as many rows as one address may fail at once.
"""

from tests.bad_inputs.row import SECRET, Row

GOOD = "0iVxZ2PvJm3nYc7bqLr5TgKd8WsAeHfU"
EXPIRED = "e" * 32
REFUSED = ("UNAUTHENTICATED", "NotAuthenticated")
UNKNOWN = "does not know the token"
CREDENTIALS: dict[str, tuple[str | None, str]] = {
    "none": (None, "asks for a token"),
    "nothing": ("", "no bearer token"),
    "no token": ("Bearer ", "token"),
    "a wrong token": ("Bearer " + "n" * 32, UNKNOWN),
    "an expired token": (f"Bearer {EXPIRED}", "has expired"),
    "a cut token": (f"Bearer {GOOD[:-1]}", UNKNOWN),
    "a token in other case": (f"Bearer {GOOD.swapcase()}", UNKNOWN),
    "a token and more": (f"Bearer {GOOD} {GOOD}", UNKNOWN),
    "a password": (f"Basic user:{SECRET}", "no bearer token"),
    "a token of 4 kB": ("Bearer " + "x" * 4096, UNKNOWN),
}
ROWS = [Row(f"token {words}", sent, *REFUSED, text) for words, (sent, text) in CREDENTIALS.items()]
