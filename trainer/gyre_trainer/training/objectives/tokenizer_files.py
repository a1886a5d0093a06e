"""Which ids a `tokenizer.json` gives to the tokens that objectives need."""

import json
from dataclasses import dataclass
from pathlib import Path

from gyre_trainer.errors import ConfigError
from gyre_trainer.shards.regular_files import read_regular

TOKENIZER_FILE = "tokenizer.json"
_MASKS = ("[MASK]", "<mask>")
_FIRST_SENTINEL = "<extra_id_0>"


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids of special tokens.

    Attributes:
        all: of every special token.
        mask: of the mask token; None where there is none.
        sentinel: of `<extra_id_0>`; None where there is none.
    """

    all: frozenset[int] = frozenset()
    mask: int | None = None
    sentinel: int | None = None


def special_ids(path: Path) -> SpecialIds:
    """The special tokens of the tokenizer in the file ``path``.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        added = json.loads(read_regular(path))["added_tokens"]
        by_name = {str(each["content"]): int(each["id"]) for each in added if each["special"]}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no {TOKENIZER_FILE}, because it has no list of added tokens"
        ) from error
    mask = next((by_name[name] for name in _MASKS if name in by_name), None)
    return SpecialIds(frozenset(by_name.values()), mask, by_name.get(_FIRST_SENTINEL))
