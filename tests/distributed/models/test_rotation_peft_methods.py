"""Methods of peft beside rotated layers are as in one process: trained, saved; or refused."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import rotate_all
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.conftest import StartRanks
from tests.distributed.models.test_rotation_adapters import llama, tokens
from tests.distributed.training import whole

LAYERS = ["q_proj", "v_proj", "up_proj"]
EARLY = (("prompt", "before"),)
DEEP = ("lora", "prompt", "pissa", "olora", "ia3", "ptuning", "embedding", "head")
LATER = ("lora", "ia3")
SAVED = ("prompt", "lora", "ia3")
# Peft begins these in single precision alone.
SINGLE = ("pissa", "olora")


def settings(kind: str) -> Any:
    """Settings of peft whose adapters matter from the first step on."""
    import peft

    library: Any = peft
    drawn: dict[str, Any] = {"r": 3, "target_modules": LAYERS, "init_lora_weights": False}
    made: dict[str, Callable[[], Any]] = {
        "lora": lambda: library.LoraConfig(**drawn),
        "dora": lambda: library.LoraConfig(**drawn, use_dora=True),
        "pissa": lambda: library.LoraConfig(**{**drawn, "init_lora_weights": "pissa"}),
        "olora": lambda: library.LoraConfig(**{**drawn, "init_lora_weights": "olora"}),
        "embedding": lambda: library.LoraConfig(**{**drawn, "target_modules": ["embed_tokens"]}),
        "head": lambda: library.LoraConfig(**{**drawn, "target_modules": ["lm_head"]}),
        "oft": lambda: library.OFTConfig(
            r=0, oft_block_size=4, target_modules=LAYERS, init_weights=False
        ),
        "ia3": lambda: library.IA3Config(
            target_modules=["v_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            init_ia3_weights=False,
        ),
        "prompt": lambda: library.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "ptuning": lambda: library.PromptEncoderConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16
        ),
    }
    return made[kind]()


def base(kind: str) -> Any:
    """A model; its norms compute in its dtype, which those of the library do not."""
    model = llama()
    for path, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(path, nn.RMSNorm(24, module.variance_epsilon).double())
    return model.float() if kind in SINGLE else model


def adapted(model: nn.Module, kind: str) -> Any:
    import peft

    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels for CUDA
        made: Any = peft.get_peft_model(model, settings(kind), autocast_adapter_dtype=False)
    return made if kind in SINGLE else made.double()


class Outcome(NamedTuple):
    """What a model is after training.

    Attributes:
        gradients: of the first step.
        parameters: those that train, after the last step.
        logits: after it.
    """

    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    logits: Tensor


def trained(model: Any, part: int, num_parts: int, path: Path | None = None) -> Outcome:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    gradients: dict[str, Tensor] = {}
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
        optimizer.step()
        optimizer.zero_grad()
    parameters = {n: whole(p.detach()) for n, p in model.named_parameters() if p.requires_grad}
    if path is not None:
        model.save_pretrained(path)
    with torch.no_grad():
        return Outcome(gradients, parameters, model.eval()(input_ids=tokens(5)).logits)


def on_the_ring(kind: str, order: str, path: Path) -> Outcome:
    mesh, model = make_mesh("cpu"), base(kind)
    if order == "before":
        model = adapted(model, kind)
    rotate_all(model, mesh=mesh, find_blocks=False)
    if order == "after":
        model = adapted(model, kind)
        assert not any(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad)
    folder = path / str(dist.get_rank()) if kind in SAVED else None
    return trained(model, dist.get_rank(), mesh.size(), folder)


ORDERS = [
    *((kind, order, 2) for kind, order in EARLY),
    *(
        pytest.param(kind, order, num, marks=pytest.mark.models)
        for kind in DEEP
        for order in ("before", *(["after"] if kind in LATER else []))
        for num in (2, 3)
        if num == 3 or (kind, order) not in EARLY
    ),
]


@pytest.mark.parametrize(("kind", "order", "num_ranks"), ORDERS)
def test_adapters_are_trained_and_saved_as_in_one_process(
    ranks: StartRanks, tmp_path: Path, kind: str, order: str, num_ranks: int
) -> None:
    import peft

    alone = trained(adapted(base(kind), kind), 0, 1)
    tolerance = 1e-4 if kind in SINGLE else 1e-9
    for found in ranks(num_ranks).run(on_the_ring, kind, order, tmp_path):
        for one, other in zip(found[:2], alone[:2], strict=True):
            assert one.keys() == other.keys()
            for name, expected in other.items():
                torch.testing.assert_close(one[name], expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found.logits, alone.logits, rtol=tolerance, atol=tolerance)
    for folder in tmp_path.iterdir():
        library: Any = peft
        loaded = library.PeftModel.from_pretrained(base(kind), str(folder)).double().eval()
        with torch.no_grad():
            logits = loaded(input_ids=tokens(5)).logits
        # peft reads some in single precision
        torch.testing.assert_close(logits, alone.logits, rtol=1e-4, atol=1e-6)


def refusal(kind: str) -> str:
    import peft

    library: Any = peft
    model, mesh = base(kind), make_mesh("cpu")
    if kind == "merge":
        model = adapted(model, "lora")
    others = {
        "modules to save": library.LoraConfig(target_modules=LAYERS, modules_to_save=["lm_head"]),
        "norms": library.LNTuningConfig(target_modules=["input_layernorm"]),
        "prompts": library.AdaptionPromptConfig(
            adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM"
        ),
        "rows": library.LoraConfig(target_modules=[], target_parameters=["q_proj.weight"]),
    }
    try:
        if kind == "oft, then rotated":
            model = adapted(model, "oft")
        rotate_all(model, mesh=mesh, find_blocks=False)
        if kind == "merge":
            model.base_model.merge_adapter()
        elif kind in others:
            library.get_peft_model(model, others[kind])
        else:
            adapted(model, kind)(input_ids=tokens(0))
    except RotationError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("merge", "cannot be merged into a layer that rotates"),
        ("modules to save", "Use LoRA of layers, or (IA)3"),
        ("norms", "Use LoRA of layers, or (IA)3"),
        ("prompts", "Use LoRA of layers, or (IA)3"),
        ("rows", "Use LoRA of layers, or (IA)3"),
        ("oft", "Use LoRA of layers, or (IA)3"),
        ("prompt", "prompts need get_peft_model first"),
        ("dora", "the adapter reads weights"),
        ("pissa", "the adapter reads weights"),
        ("oft, then rotated", "peft's Linear reads the weights of its layer"),
    ],
)
def test_what_needs_whole_weights_later_is_refused(
    ranks: StartRanks, kind: str, words: str
) -> None:
    for found in ranks(2).run(refusal, kind):
        assert words in found
