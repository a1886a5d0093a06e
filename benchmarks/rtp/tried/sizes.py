"""The sizes of tiny models and of their arguments."""

from typing import Any

NUM_ROWS, NUM_TOKENS, VOCABULARY = 12, 8, 40
IMAGE_TOKEN = 39

Arguments = dict[str, Any]
