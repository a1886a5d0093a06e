"""Caches of keys and values of `transformers` where attention rotates as a whole."""

from collections.abc import Callable
from inspect import signature
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor

from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole

COMMON = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "pad_token_id": 0,
    "eos_token_id": None,
}
OF_A_TRANSLATOR = {
    "d_model": 24,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 6),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 37),
    **dict.fromkeys(("dropout", "attention_dropout"), 0.0),
    "decoder_start_token_id": 1,
    "max_position_embeddings": 20,
    "forced_eos_token_id": None,
}
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", COMMON),
    "Llama, heads that three ranks cannot share": (
        "LlamaForCausalLM",
        COMMON | {"num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "Qwen3": ("Qwen3ForCausalLM", COMMON | {"head_dim": 8}),
    "Gemma2, every other layer with a window": (
        "Gemma2ForCausalLM",
        COMMON | {"head_dim": 8, "sliding_window": 5},
    ),
    "GPTNeoX": ("GPTNeoXForCausalLM", COMMON),
    "Mistral, with a window": ("MistralForCausalLM", COMMON | {"sliding_window": 4}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a decoder that attends to an encoder": (
        "BlenderbotSmallForConditionalGeneration",
        COMMON | OF_A_TRANSLATOR,
    ),
    "LFM2, whose cache also has convolutions": (
        "Lfm2ForCausalLM",
        COMMON | {"layer_types": ["conv", "full_attention"]},
    ),
}


def made(name: str) -> Any:
    """A tiny model in float64."""
    import transformers  # seconds, for these tests alone

    library: Any = transformers
    torch.manual_seed(0)
    kind, sizes = (CAUSAL | OTHERS)[name]
    configure = getattr(library, kind).config_class
    return getattr(library, kind)(configure(**sizes)).double().eval()


def rotated(name: str, **options: Any) -> Any:
    model = made(name)
    # LFM2 reads the weights of its convolutions
    rules: Any = {"*.conv.conv": None} if "LFM2" in name else None
    rotate_all(model, mesh=make_mesh("cpu"), rules=rules, find_blocks=True, **options)
    return model


def tokens(num_tokens: int, of: int | None = None) -> Tensor:
    """Two rows of this rank, or of another one."""
    seeded = torch.Generator().manual_seed(dist.get_rank() if of is None else of)
    return torch.randint(1, 61, (2, num_tokens), generator=seeded)


def cache_of(model: Any, kind: str) -> Any:
    import transformers

    if kind == "none given":
        return None
    if kind == "without layers yet":
        return transformers.DynamicCache()
    return transformers.StaticCache(model.config, max_cache_len=12)


def given(model: Any, cache: Any) -> dict[str, Any]:
    """The argument that gives a model a cache: transformers 5.24 has another name for it."""
    names = signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


def kept_by(output: Any) -> Any:
    """The cache in a model's output."""
    return output["cache" if "cache" in output else "past_key_values"]


@torch.no_grad()
def step_by_step(model: Any, kind: str) -> tuple[Tensor, list[Tensor]]:
    """The logits of four tokens, then of one at a time, and what the cache has at last."""
    rows, cache = tokens(8), cache_of(model, kind)
    logits = []
    for part in (rows[:, :4], *torch.split(rows[:, 4:], 1, dim=1)):
        output = model(input_ids=part, **given(model, cache), use_cache=True)
        cache = kept_by(output)
        logits.append(output.logits)
    lengths = torch.tensor([int(cache.get_seq_length(layer)) for layer in range(2)])
    kept = [each for layer in cache.layers for each in (layer.keys, layer.values)]
    return torch.cat(logits, 1), [*kept, lengths]


def off_step_by_step(names: list[str]) -> dict[str, float]:
    """How far logits and kept keys and values are from the plain model's."""
    found = {}
    for name in names:
        plain, model = made(name), rotated(name)
        for kind in ("none given", "without layers yet", "static"):
            if kind == "without layers yet" and name != "Llama":
                continue
            expected, expected_kept = step_by_step(plain, kind)
            logits, kept = step_by_step(model, kind)
            pairs = zip([logits, *kept], [expected, *expected_kept], strict=True)
            found[f"{name}: {kind}"] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_step_and_what_is_kept_are_those_of_the_plain_model(
    ranks: StartRanks, num_ranks: int
) -> None:
    for found in ranks(num_ranks).run(off_step_by_step, list(CAUSAL)):
        assert {name: off for name, off in found.items() if not off < 1e-12} == {}


WAYS: dict[str, dict[str, Any]] = {
    "the likeliest": {"do_sample": False},
    "sampled": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 3},
    "a static cache": {"do_sample": False, "cache_implementation": "static"},
    "prompt look-up, which crops": {
        "do_sample": False,
        "prompt_lookup_num_tokens": 2,
        "eos_token_id": 60,
    },
}


def texts(model: Any, way: str) -> list[list[int]]:
    torch.manual_seed(3)
    prompt = tokens(4)
    if "look-up" in way:
        prompt = torch.tensor([[3, 9, 3, 9, 3, 9]])
    mask = torch.ones_like(prompt)
    found = model.generate(prompt, attention_mask=mask, max_new_tokens=5, **WAYS[way])
    return [list(map(int, row)) for row in found]


def other_texts(names: list[str], ways: list[str]) -> list[str]:
    """What has other texts than the plain model."""
    found = []
    for name in names:
        plain, model = made(name), rotated(name)
        for way in ways:
            if "window" in name and "crops" in way:
                continue  # the library crops no window
            if texts(model, way) != texts(plain, way):
                found.append(f"{name}: {way}")
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_generate_gives_the_texts_of_the_plain_model(
    ranks: StartRanks, way: str, num_ranks: int
) -> None:
    names = list(CAUSAL) if way == "the likeliest" else ["Llama", list(CAUSAL)[3]]
    assert ranks(num_ranks).run(other_texts, names, [way]) == [[]] * num_ranks


def outcome(model: Any, *rows: Tensor) -> dict[str, Tensor]:
    """Loss and gradients of the last rows, after those before without gradients."""
    *before, last = rows
    cache = None
    for each in before:
        with torch.no_grad():
            cache = kept_by(model(input_ids=each, **given(model, cache), use_cache=True))
    output = model.train()(input_ids=last, labels=last, **given(model, cache))
    assert kept_by(output) is not None
    output.loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()} | {
        "loss": output.loss.detach()
    }


def off_in_training(name: str, recompute: bool, in_two: bool) -> float:
    """How far the loss and the gradients are from one process's, with the library's default."""
    num_ranks, parts = dist.get_world_size(), [5, 3] if in_two else [8]
    found = outcome(
        rotated(name, policy=RotationPolicy(recompute="block" if recompute else "none")),
        *torch.split(tokens(8), parts, 1),
    )
    dist.all_reduce(found["loss"])
    found["loss"] /= num_ranks
    rows = torch.cat([tokens(8, of=rank) for rank in range(num_ranks)])
    expected = outcome(made(name), *torch.split(rows, parts, 1))
    assert found.keys() == expected.keys()
    return max(
        float((found[each] - expected[each]).abs().max() / expected[each].abs().max())
        for each in expected
    )


@pytest.mark.parametrize("in_two", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_training_with_the_default_cache_is_exact(
    ranks: StartRanks, recompute: bool, in_two: bool
) -> None:
    """The library makes a cache in each call; keys of before may be given without gradients."""
    for off in ranks(2).run(off_in_training, "Llama", recompute, in_two):
        assert off < 1e-6  # the library computes losses in float32


def told_of_gradients() -> list[str]:
    """What is said about gradients that would flow through a cache."""
    model = rotated("Llama")
    output = model(input_ids=tokens(4))
    cache = kept_by(output)
    told = []
    attempts: tuple[Callable[[], Any], ...] = (
        lambda: model(input_ids=tokens(1), **given(model, cache)),
        lambda: cache.layers[1].keys.sum().backward(),
    )
    for attempt in attempts:
        try:
            attempt()
        except RotationError as error:
            told.append(str(error))
    with torch.no_grad():
        cache.reorder_cache(torch.tensor([1, 0]))
        model(input_ids=tokens(1), **given(model, cache))
    assert cache.get_seq_length() == 5
    return told


def test_gradients_through_a_cache_are_refused(ranks: StartRanks) -> None:
    for again, backward in ranks(2).run(told_of_gradients):
        assert "LlamaAttention is called with gradients and with a DynamicCache that was" in again
        assert "fill the cache under torch.no_grad()" in again
        assert "through keys and values of a cache into a module that rotates as a whole" in (
            backward
        )


def told_of_caches() -> list[str]:
    """What is said about caches that slices cannot share."""
    import transformers
    from transformers.cache_utils import DynamicLayer

    class OwnUpdate(transformers.DynamicCache):
        def update(self, *args: Any) -> Any:
            return super().update(*args)

    class OwnLayer(DynamicLayer):
        pass

    model, own_layer = rotated("Llama"), cast("Any", OwnLayer)
    odd = transformers.DynamicCache()
    for layer in range(2):
        odd.update(torch.ones(2, 3, 1, 2).double(), torch.ones(2, 3, 1, 2).double(), layer)
    told = []
    for cache, takes_grads in (
        (OwnUpdate(), False),
        (transformers.Cache(layers=[own_layer(), own_layer()]), False),
        (odd, False),
        (transformers.StaticCache(model.config, max_cache_len=8), True),
    ):
        try:
            with torch.set_grad_enabled(takes_grads):
                model(input_ids=tokens(2), **given(model, cache), use_cache=True)
        except RotationError as error:
            told.append(str(error))
    return told


def test_caches_that_slices_cannot_share_are_refused_by_name(ranks: StartRanks) -> None:
    for own_update, own_layer, heads, static in ranks(2).run(told_of_caches):
        assert "LlamaAttention is called with a OwnUpdate" in own_update
        assert "its class has its own `update`; pass a DynamicCache" in own_update
        assert "it has a OwnLayer" in own_layer
        assert "a cache of 3 heads, which are not 2 equal parts" in heads
        assert "a StaticLayer is overwritten, and the call has gradients" in static


def kept_after_a_failure() -> tuple[int, bool]:
    """The length of a cache after a call that fails, and whether the next one is right."""
    plain, model = made("Llama"), rotated("Llama")
    logits = []
    with torch.no_grad():
        for each in (plain, model):
            cache = kept_by(each(input_ids=tokens(4), use_cache=True))
            if each is model:
                with pytest.raises(RuntimeError):
                    model(
                        input_ids=tokens(1),
                        **given(model, cache),
                        attention_mask=torch.zeros(2, 1, 1, 3).double(),
                    )
                length = int(cache.get_seq_length())
            logits.append(each(input_ids=tokens(1), **given(model, cache)).logits)
    return length, torch.allclose(logits[0], logits[1], rtol=1e-12)


def test_a_call_that_fails_leaves_the_cache_as_it_was(ranks: StartRanks) -> None:
    assert ranks(2).run(kept_after_a_failure) == [(4, True), (4, True)]
