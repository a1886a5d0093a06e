# ruff: noqa: N803, N806  # names carry shape letters
"""Texts that a model continues while it is trained, the same on every rank.

Every rank computes every token, because every rank's shards are needed. The ranks add up the slices
of a layer in different orders, so their logits differ in the last bits; all of them take those of
rank 0, and so choose the same token.

Dims: T time, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gyre_trainer.comm.ring import collective
from gyre_trainer.errors import ConfigError
from gyre_trainer.shards.tensor_files import read_regular
from gyre_trainer.training.config_file import AtLeast1, NotNegative, Seed, Text
from gyre_trainer.training.gpt import GPT, GPTConfig
from gyre_trainer.training.library import LibraryConfig, num_positions, objective_of

BYTES = "bytes"
TOKENIZER_FILE = "tokenizer.json"
_END_OF_TEXT = 256  # of a vocabulary of bytes


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """Texts that the model continues after each evaluation.

    Attributes:
        prompts: texts to continue; of an encoder-decoder its encoder's inputs. None for no
            samples.
        tokenizer: a `tokenizer.json`, or "bytes"; "" takes that of `model.pretrained`, and bytes
            where the vocabulary has 256 or 257 tokens.
        max_new_tokens: tokens of a continuation; it ends earlier where the model ends its text.
        temperature: logits are divided by it before a token is drawn; 0 takes the likeliest token.
        seed: of the draws, which begin again with each prompt.
    """

    prompts: tuple[Text, ...] = ()
    tokenizer: str = ""
    max_new_tokens: AtLeast1 = 64
    temperature: NotNegative = 0.0
    seed: Seed = 0


class Codec(Protocol):
    """Text as token ids, and back."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text, with those that the tokenizer adds to it if ``special``."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...


class _Bytes:
    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(each for each in ids if each < _END_OF_TEXT).decode(errors="replace")


class _Tokenizer:
    """A `tokenizer.json`. Names of special tokens in a prompt are these tokens."""

    def __init__(self, path: Path) -> None:
        # Only runs with samples need it.
        try:
            from tokenizers import Tokenizer  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                "`sample.tokenizer` needs tokenizers, which is not installed. "
                "Run pip install 'gyre-ml[trainer,transformers]'."
            ) from error
        try:
            self._tokenizer: Any = Tokenizer.from_buffer(read_regular(path))
        except Exception as error:  # the library raises no class of its own
            raise ConfigError(f"{path} is no tokenizer for `sample.prompts`: {error}") from error

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


class Sampler:
    """Continues the prompts of one run."""

    def __init__(self, sample: SampleConfig, model: GPTConfig | LibraryConfig) -> None:
        """Read the tokenizer, and encode the prompts.

        Args:
            sample: of the configuration.
            model: of the configuration.

        Raises:
            ConfigError: there is no such tokenizer, or a prompt does not fit the model.
        """
        self._sample = sample
        self._objective = objective_of(model)
        self._codec = codec_of(sample, model)
        special = self._objective == "seq2seq"
        self._prompts = [self._codec.encode(prompt, special=special) for prompt in sample.prompts]
        for prompt, ids in zip(sample.prompts, self._prompts, strict=True):
            if not ids or max(ids) >= model.vocab_size:
                raise ConfigError(
                    f"`sample.prompts` has {prompt!r:.60}, which is {len(ids)} tokens up to id "
                    f"{max(ids, default=0)}; `model` has {model.vocab_size} ids, from 0"
                )

    @torch.no_grad()
    def texts(self, model: nn.Module) -> list[str]:
        """The continuation of each prompt. Collective; the state of random numbers stays.

        Raises:
            ConfigError: the model takes fewer tokens than a prompt and its continuation have.
        """
        device = next(model.parameters()).device
        texts = []
        for ids in self._prompts:
            _require_room(model, *self._lengths(len(ids)))
            with torch.random.fork_rng():
                torch.manual_seed(self._sample.seed)
                found = self._continued(model, torch.tensor([ids], device=device))
            texts.append(self._codec.decode(found))
        return texts

    def _lengths(self, num_tokens: int) -> tuple[int, ...]:
        """The tokens that each part of a model is given for a prompt of ``num_tokens``."""
        if self._objective == "causal":
            return (num_tokens + self._sample.max_new_tokens,)
        return num_tokens, self._sample.max_new_tokens + 1

    def _continued(self, model: nn.Module, tokens_1T: Tensor) -> list[int]:
        """The ids that follow."""
        if isinstance(model, GPT):
            return self._of_gpt(model, tokens_1T)
        # It takes seconds, and only these models need it.
        from transformers import LogitsProcessorList  # noqa: PLC0415

        library: Any = model
        draws = self._sample.temperature > 0
        ids_1T: Tensor = library.generate(
            tokens_1T,
            attention_mask=torch.ones_like(tokens_1T),
            max_new_tokens=self._sample.max_new_tokens,
            do_sample=draws,
            **({"temperature": self._sample.temperature} if draws else {}),
            use_cache=False,
            pad_token_id=0,  # of texts that end before others; there are none
            logits_processor=LogitsProcessorList([_of_first_rank]),
        )
        end = library.generation_config.eos_token_id
        num_given = tokens_1T.shape[1] if self._objective == "causal" else 1  # the decoder's start
        return _until(end, ids_1T[0, num_given:].tolist())

    def _of_gpt(self, model: GPT, tokens_1T: Tensor) -> list[int]:
        """Without a cache: every token of the window is computed again for the next one."""
        found: list[int] = []
        end = _END_OF_TEXT if isinstance(self._codec, _Bytes) else None
        for _ in range(self._sample.max_new_tokens):
            window_1T = tokens_1T[:, -model.config.max_seq_len :]
            logits_1V = _of_first_rank(window_1T, model(window_1T)[:, -1].float())
            if self._sample.temperature > 0:
                shares_1V = (logits_1V / self._sample.temperature).softmax(-1)
                next_11 = torch.multinomial(shares_1V, 1)
            else:
                next_11 = logits_1V.argmax(-1, keepdim=True)
            if int(next_11) == end:
                break
            found.append(int(next_11))
            tokens_1T = torch.cat([tokens_1T, next_11], dim=1)
        return found


def codec_of(sample: SampleConfig, model: GPTConfig | LibraryConfig) -> Codec:
    """The encoder of prompts into ids.

    Raises:
        ConfigError: there is no tokenizer, or none can be read.
    """
    name = sample.tokenizer
    pretrained = model.pretrained if isinstance(model, LibraryConfig) else ""
    if not name and pretrained and (Path(pretrained) / TOKENIZER_FILE).exists():
        name = str(Path(pretrained) / TOKENIZER_FILE)
    if name == BYTES or (not name and model.vocab_size in (256, 257)):
        return _Bytes()
    if not name:
        raise ConfigError(
            f"`sample.prompts` needs `sample.tokenizer`, the path of a {TOKENIZER_FILE}, or "
            f'"{BYTES}"'
        )
    return _Tokenizer(Path(name))


def _require_room(model: nn.Module, *lengths: int) -> None:
    """Refuse more tokens than a model of transformers has positions; a GPT takes a window."""
    if isinstance(model, GPT):
        return
    most = num_positions(model.config)
    if most is not None and max(lengths) > most:
        raise ConfigError(
            f"a prompt and `sample.max_new_tokens` are {max(lengths)} tokens, but "
            f"{type(model).__name__} takes {most}"
        )


def _of_first_rank(_tokens_BT: Tensor, logits_BV: Tensor) -> Tensor:
    """The logits of rank 0, on every rank."""
    if dist.is_initialized():
        logits_BV = logits_BV.contiguous()
        with collective("the logits of a sample"):
            dist.broadcast(logits_BV, src=0)
    return logits_BV


def _until(end: int | Sequence[int] | None, ids: list[int]) -> list[int]:
    """The ids before the first one that ends a text."""
    ends = {end} if isinstance(end, int) else set(end or ())
    return ids[: next((place for place, each in enumerate(ids) if each in ends), len(ids))]
