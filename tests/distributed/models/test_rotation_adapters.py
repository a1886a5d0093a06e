"""Adapters of peft in a model that is then rotated: exact, few bytes, saved; or refused."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer import pretrained
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.rotate import causal_loss, materialize, rotate_all
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.refused_modules import told
from tests.distributed.training import bytes_of_embedding, whole

SIZES = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "vocab_size": 60}
LAYERS = ["q_proj", "v_proj", "up_proj"]
# Peft begins these in single precision alone.
SINGLE = ("pissa", "olora", "begins", "gaussian")


def llama() -> Any:
    """A model; its norms compute in its dtype, which those of the library do not."""
    import transformers  # seconds, for these tests alone

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    library: Any = transformers
    model = library.LlamaForCausalLM(library.LlamaConfig(use_cache=False, **SIZES, **heads))
    for path, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(path, nn.RMSNorm(24, module.variance_epsilon))
    return model.double()


def settings(kind: str) -> Any:
    """Settings of peft whose adapters matter from the first step on, unless they are begun."""
    import peft

    library: Any = peft
    lora: dict[str, Any] = {"r": 3, "target_modules": LAYERS, "init_lora_weights": False}
    made: dict[str, Callable[[], Any]] = {
        "lora": lambda: library.LoraConfig(**lora),
        "begins": lambda: library.LoraConfig(**lora | {"init_lora_weights": True}),
        "gaussian": lambda: library.LoraConfig(**lora | {"init_lora_weights": "gaussian"}),
        "dora": lambda: library.LoraConfig(**lora, use_dora=True),
        "pissa": lambda: library.LoraConfig(**lora | {"init_lora_weights": "pissa"}),
        "olora": lambda: library.LoraConfig(**lora | {"init_lora_weights": "olora"}),
        "embedding": lambda: library.LoraConfig(**lora | {"target_modules": ["embed_tokens"]}),
        "head": lambda: library.LoraConfig(**lora | {"target_modules": ["lm_head"]}),
        "oft": lambda: library.OFTConfig(
            r=0, oft_block_size=4, target_modules=LAYERS, init_weights=False
        ),
        "ia3": lambda: library.IA3Config(
            target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        "prompt": lambda: library.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "ptuning": lambda: library.PromptEncoderConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16
        ),
    }
    return made[kind]()


def adapted(model: nn.Module, kind: str) -> Any:
    import peft

    model = model.float() if kind in SINGLE else model
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels for CUDA
        made: Any = peft.get_peft_model(model, settings(kind), autocast_adapter_dtype=False)
    return made.to(next(model.parameters()).dtype)


def tokens(step: int) -> Tensor:
    return torch.randint(60, (12, 7), generator=torch.Generator().manual_seed(step))


class Outcome(NamedTuple):
    """What a model is after training.

    Attributes:
        losses: of this part.
        gradients: of the first step.
        parameters: those that train, after the last step.
        logits: after it.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    logits: Tensor


def trained(model: Any, part: int, num_parts: int, path: Path | None = None) -> Outcome:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, gradients = [], dict[str, Tensor]()
    for step in range(3):
        rows = tokens(step).chunk(num_parts)[part]
        logits = model(input_ids=rows).logits[:, -rows.shape[1] :]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = gradients or {
            name: whole(p.grad).clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    parameters = {n: whole(p.detach()) for n, p in model.named_parameters() if p.requires_grad}
    if path is not None:
        model.save_pretrained(path)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens(5)).logits
    return Outcome(losses, gradients, parameters, logits)


def on_the_ring(kind: str, path: Path) -> Outcome:
    mesh, model = make_mesh("cpu"), adapted(llama(), kind)
    rotate_all(model, mesh=mesh)
    if kind in ("lora", "ia3"):
        assert not any(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad)
    saves = kind in ("prompt", "lora", "ia3")
    return trained(
        model, dist.get_rank(), mesh.size(), path / str(dist.get_rank()) if saves else None
    )


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        *(("prompt", 2), ("ia3", 2), ("lora", 3)),
        *(
            pytest.param(kind, 3, marks=pytest.mark.models)
            for kind in ("prompt", "pissa", "olora", "ia3", "ptuning", "embedding", "head")
        ),
    ],
)
def test_adapters_are_trained_and_saved_as_in_one_process(
    ranks: StartRanks, tmp_path: Path, kind: str, num_ranks: int
) -> None:
    import peft

    alone = trained(adapted(llama(), kind), 0, 1)
    tolerance = 1e-4 if kind in SINGLE else 1e-9
    found = ranks(num_ranks).run(on_the_ring, kind, tmp_path)
    means = [sum(of_step) / num_ranks for of_step in zip(*(o.losses for o in found), strict=True)]
    assert means == pytest.approx(alone.losses, rel=tolerance)
    for outcome in found:
        for one, other in zip(outcome[1:3], alone[1:3], strict=True):
            assert one.keys() == other.keys()
            for name, expected in other.items():
                torch.testing.assert_close(one[name], expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(outcome.logits, alone.logits, rtol=tolerance, atol=tolerance)
    for folder in tmp_path.iterdir():
        library: Any = peft
        loaded = library.PeftModel.from_pretrained(llama(), str(folder)).double().eval()
        with torch.no_grad():
            logits = loaded(input_ids=tokens(5)).logits
        # peft reads some in single precision
        torch.testing.assert_close(logits, alone.logits, rtol=1e-4, atol=1e-6)


def made_from_meta(kind: str, folder: Path) -> list[dict[str, Tensor]]:
    """The parameters of models with loaded, and with initial weights."""
    found = []
    for source in (folder, None):
        with torch.device("meta"):
            model = adapted(llama().float(), kind)
        rotate_all(model, mesh=make_mesh("cpu"))
        torch.manual_seed(1)
        if source is None:
            materialize(model, seed=3)
        else:
            pretrained.load(model, source)
        model(input_ids=tokens(0)).logits.sum().backward()  # which compares the ranks
        found.append({name: whole(p.detach()) for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("kind", ["begins", "gaussian", "ia3"])
def test_adapters_on_meta_begin_as_peft_begins_them(
    ranks: StartRanks, tmp_path: Path, kind: str
) -> None:
    model = llama().float()
    model.save_pretrained(tmp_path)
    expected = dict(adapted(model, kind).named_parameters())
    for loaded, initial in ranks(2).run(made_from_meta, kind, tmp_path):
        assert loaded.keys() == expected.keys()
        for name, each in expected.items():
            assert torch.equal(loaded[name], each.to(loaded[name].dtype)), name
            if "lora_B" in name or "ia3" in name:
                assert torch.equal(initial[name], loaded[name])


def bytes_of_a_step() -> int:
    mesh = make_mesh("cpu")
    model = adapted(llama(), "lora")
    rotate_all(model, mesh=mesh)
    ring = ring_of(mesh)
    rows = tokens(0).chunk(mesh.size())[dist.get_rank()]
    batch = {"input_ids": rows, "labels": rows}
    torch.autograd.backward(causal_loss(model, batch))  # which compares once
    before = ring.bytes_sent
    torch.autograd.backward(causal_loss(model, batch))
    return ring.bytes_sent - before


def test_frozen_weights_travel_without_gradients(ranks: StartRanks) -> None:
    linears = {
        name: module.weight.numel()
        for name, module in llama().named_modules()
        if isinstance(module, nn.Linear)
    }
    shape = SIZES["vocab_size"], SIZES["hidden_size"]
    # before the first adapter nothing needs a gradient, so nothing travels in backward; and the
    # gradient of the head's input is known after forward
    early = ["lm_head", *(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")]
    forward = sum(linears.values())
    backward = sum(linears.values()) - sum(linears[name] for name in early)
    for num_ranks in (2, 3):
        expected = 8 * (forward + backward) * (num_ranks - 1) // num_ranks
        rows = tokens(0).chunk(num_ranks)
        assert ranks(num_ranks).run(bytes_of_a_step) == [
            expected + bytes_of_embedding(rows, rank, shape, weight=8, grad=0)
            for rank in range(num_ranks)
        ]


def refusal(kind: str, when: str) -> None:
    """Rotate a model before or after it gets adapters; then call or merge it, or add others."""
    import peft

    model = llama()
    if when != "later":
        model = adapted(model, kind)
    rotate_all(model, mesh=make_mesh("cpu"))
    if when == "merge":
        model.base_model.merge_adapter()
    if when == "second":
        peft.PeftModel.add_adapter(model, "second", settings(kind))
        model.set_adapter("second")
    if when == "later":
        model = adapted(model, kind)
    model(input_ids=tokens(0))


@pytest.mark.parametrize(
    ("kind", "when", "words"),
    [
        ("lora", "later", "Call get_peft_model before rotate_all"),
        ("prompt", "later", "Call get_peft_model before rotate_all"),
        ("lora", "second", "Add layers and adapters (get_peft_model) before rotate_all"),
        ("lora", "merge", "cannot be merged into a layer that rotates"),
        ("dora", "first", "peft's Linear reads the weights of its layer"),
        ("oft", "first", "peft's Linear reads the weights of its layer"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(
    ranks: StartRanks, kind: str, when: str, words: str
) -> None:
    for found in ranks(2).run(told, partial(refusal, kind, when)):
        assert words in found
