"""The computations of a check. Each function runs on every rank of a process group, on its device.

A case is a small model whose forward is the mean loss of a batch. Rotated ranks that each have a
part of a batch must get the loss, gradients and parameters that one process gets of all of it.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gyre_trainer.accounting.step_cost import measure_step
from gyre_trainer.comm.identity import BufferPool
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import (
    Direction,
    Hop,
    Leg,
    ProcessGroupTransport,
    Ring,
    Stream,
    Wait,
    ring_of,
)
from gyre_trainer.layers.experts import Experts, MoE
from gyre_trainer.layers.mlp import GatedMLP
from gyre_trainer.rotate import RotationPolicy, linear_cross_entropy, rotate_all
from gyre_trainer.rotation.rule import Recompute
from gyre_trainer.training.build import build_model
from gyre_trainer.training.collate import Examples, stand_in
from gyre_trainer.training.config import TrainConfig, build
from gyre_trainer.training.gpt import GPT, GPTConfig
from gyre_trainer.training.lora import Lora, adapt
from gyre_trainer.training.rank_context import RankContext
from gyre_trainer.training.run_checkpoints import Checkpoints, TrainState, latest
from gyre_trainer.training.step import Stepper

BATCH = 24  # samples; 1, 2, 3 and 8 ranks divide it
LENGTH = 8
VOCABULARY = 37  # no number of ranks divides it
NUM_STEPS = 3
EXACT = 1e-11  # float64: sums in another order differ by less
_REST_S = 0.002  # of a hop that arrives late, and of a computation


class _Loss(nn.Module):
    """A model whose forward is the loss of a batch of tokens."""

    def __init__(self, model: nn.Module, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.model = model
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return linear_cross_entropy(self.head, self.model(self.embedding(tokens)), tokens)


class _GPTLoss(nn.Module):
    def __init__(self, **shape: Any) -> None:
        super().__init__()
        sizes = {"num_layers": 2, "dim": 48, "num_heads": 12, "num_kv_heads": 6, "hidden_dim": 50}
        sizes |= {"vocab_size": VOCABULARY, "max_seq_len": LENGTH}
        self.gpt = GPT(GPTConfig(**sizes | shape))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt.loss(tokens[:, :-1], tokens[:, 1:])


class _LibraryLoss(nn.Module):
    """A Llama of transformers, with adapters of peft if ``rank`` is above 0."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  # an extra

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            intermediate_size=50,
            num_hidden_layers=2,
            num_attention_heads=12,
            num_key_value_heads=6,
            use_cache=False,
        )
        self.llama = LlamaForCausalLM(config)
        for module in list(self.llama.modules()):
            for name, _ in list(module.named_children()):
                if name.endswith("norm"):  # the library's own rounds to float32
                    setattr(module, name, nn.RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.rank = rank

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.llama.model(input_ids=tokens).last_hidden_state
        loss: Tensor = linear_cross_entropy(self.llama.lm_head, hidden[:, :-1], tokens[:, 1:])
        return loss


class _Positions(nn.Module):
    """Reads a table that it has itself, which is gathered when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, 24))
        self.layer = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x + self.table)
        return y.tanh()


class _Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(24, 31, 3, padding=1), nn.Conv2d(1, 7, (31, 1))
        self.last = nn.Linear(7, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x.transpose(1, 2)).tanh()
        output: Tensor = self.last(self.second(y[:, None])[:, :, 0].transpose(1, 2))
        return output


def _layer_of_torch(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(24, 6, 50, batch_first=True, **options)


CASES: Mapping[str, Callable[[], nn.Module]] = {
    "embedding, grouped attention, gated MLP, RMSNorm, head": _GPTLoss,
    "biases, plain MLP, LayerNorm, tied head": partial(
        _GPTLoss, gated_mlp=False, norm="layer", tie_embeddings=True, num_kv_heads=12
    ),
    "experts": lambda: _Loss(MoE(24, 10, num_experts=6, num_chosen=2), 24),
    "convolutions": lambda: _Loss(_Conv(), 24),
    "torch's transformer layer": lambda: _Loss(_layer_of_torch(dropout=0.0, bias=False), 24),
    "gathered on use": lambda: _Loss(_Positions(), 24),
    "replicated": _GPTLoss,
    "Llama of transformers": _LibraryLoss,
    "LoRA": partial(_LibraryLoss, rank=3),
}
LIBRARY_CASES = ("Llama of transformers", "LoRA")
QUICK_CASES = ("embedding, grouped attention, gated MLP, RMSNorm, head", "experts", "replicated")


def _built(case: str, device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    return CASES[case]().double().to(device)


def _adapted(model: nn.Module) -> nn.Module:
    """The model with its adapters, if it gets some."""
    if isinstance(model, _LibraryLoss) and model.rank:
        adapt(model.llama.requires_grad_(False), Lora(rank=model.rank, alpha=9.0), seed=2)
        for name, parameter in model.named_parameters():
            if "lora" in name:  # one of the two begins as 0, in float32
                whole = torch.empty(parameter.shape, dtype=torch.float64)
                nn.init.normal_(whole, std=0.1, generator=torch.Generator().manual_seed(len(name)))
                parameter.data = parameter.data.double().copy_(whole)
    return model


def _rotated(case: str, device: torch.device, policy: RotationPolicy) -> nn.Module:
    model = _adapted(_built(case, device))
    is_lora = isinstance(model, _LibraryLoss) and model.rank > 0
    rotate_all(
        model,
        mesh=make_mesh(device.type),
        policy=policy,
        min_numel=2**40 if case == "replicated" else 0,
        find_blocks=not is_lora,
    )
    return model


def tokens_of(step: int, device: torch.device) -> Tensor:
    """The batch of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator).to(device)


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return _whole(tensor.grad)


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: _grad(each) for name, each in model.named_parameters()}


def _part(tokens: Tensor) -> Tensor:
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _trained(
    model: nn.Module, part: Callable[[Tensor], Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Losses, gradients and parameters of a few steps of AdamW."""
    trainable = [each for each in model.parameters() if each.requires_grad]
    # AdamW would blow up gradients of 0 with a rounding error
    optimizer = torch.optim.AdamW(trainable, lr=3e-3, eps=1e-3)
    found = {}
    for step in range(NUM_STEPS):
        loss = model(part(tokens_of(step, device)))
        loss.backward()
        mean = loss.detach().clone()
        if part is _part:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        found[f"loss {step}"] = mean
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"gradient {step} of {name}"] = _whole(parameter.grad).clone()
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: _whole(each.detach()) for name, each in model.named_parameters()}


def _distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest distance of two tensors, relative to the norm; NaN counts as infinite."""
    if found.keys() != expected.keys():
        raise ValueError(f"other results: {sorted(found.keys() ^ expected.keys())[:4]}")
    worst = 0.0
    for name, there in expected.items():
        here, value = (each.detach().double().cpu() for each in (found[name], there))
        error = (here - value).norm() / value.norm().clamp_min(1e-2)
        worst = max(worst, float(error.nan_to_num(nan=torch.inf)))
    return worst


def ranks_against_one(
    device: torch.device,
    cases: Sequence[str],
    recompute: Sequence[Recompute],
    other_device_type: str = "",
) -> dict[str, float]:
    """The distance of each case on all ranks from one process, by case and recomputation.

    The one process computes with plain modules, on another device if one is given.
    """
    other = torch.device(other_device_type or device.type)
    found = {}
    for case in cases:
        alone = _trained(_adapted(_built(case, other)), lambda tokens: tokens, other)
        for mode in recompute:
            model = _rotated(case, device, RotationPolicy(recompute=mode))
            found[f"{case}, {mode}"] = _distance(_trained(model, _part, device), alone)
    return found


class _Routed(nn.Module):
    """Experts whose rows are multiples of 16 bytes in bfloat16, as grouped products ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(16, 96, 64)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = x[:, :16].topk(2)
        output: Tensor = self.experts(x, chosen, weights.softmax(-1))
        return output


_ROUNDED: Mapping[str, Callable[[], nn.Module]] = {
    "MLP": partial(GatedMLP, 96, 256),
    "experts": _Routed,
}


def rounding(device: torch.device) -> dict[str, float]:
    """The error of bfloat16 in outputs, and in gradients of inputs and weights, against float64.

    On CUDA, experts compute by grouped products in bfloat16, and one after the other in float64.
    """
    found: dict[str, float] = {}
    for name, kind in _ROUNDED.items():
        torch.manual_seed(3)
        exact, module = kind().double().to(device), kind().to(device)
        module.load_state_dict(exact.state_dict())
        rotate_all(
            nn.Sequential(module),
            mesh=make_mesh(device.type),
            policy=RotationPolicy(compute_dtype=torch.bfloat16, residual_dtype=torch.float32),
            min_numel=0,
        )
        x = torch.randn(dist.get_world_size() * 32, 96, dtype=torch.float64, device=device)
        mine = _part(x).float().requires_grad_()
        x.requires_grad_()
        for model, inputs in ((exact, x), (module, mine)):
            (model(inputs).sin().sum() / len(inputs)).backward()
        with torch.no_grad():
            output = _distance({"": module(mine)}, {"": exact(mine.double())})
        grad = _part(_grad(x)) * dist.get_world_size()
        found |= {
            f"{name}, output": output,
            f"{name}, input's gradient": _distance({"": _grad(mine)}, {"": grad}),
            f"{name}, weights' gradients": _distance(_grads(module), _grads(exact)),
        }
    return found


def masks(device: torch.device) -> dict[str, bool]:
    """Whether dropout is drawn again in backward, repeats with its seed, and differs by rank."""

    def grads(recompute: Recompute, seed: int) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = _Loss(_layer_of_torch(dropout=0.3), 24).double().to(device)
        policy = RotationPolicy(recompute=recompute)
        rotate_all(model, mesh=make_mesh(device.type), policy=policy, min_numel=0)
        torch.manual_seed(seed)
        loss = model(tokens_of(0, device)[:2])  # the same rows on all ranks
        loss.backward()
        return {"loss": loss.detach()} | _grads(model)

    by_mode = {mode: grads(mode, 5) for mode in ("none", "block", "layer")}
    again, other = grads("block", 5), grads("block", 6 + dist.get_rank())
    losses = [torch.zeros_like(other["loss"]).cpu() for _ in range(dist.get_world_size())]
    dist.all_gather(losses, other["loss"].cpu())
    distances = {mode: _distance(by_mode[mode], by_mode["none"]) for mode in ("block", "layer")}
    return {
        **{f"{mode} draws the masks of forward again": d < EXACT for mode, d in distances.items()},
        "one seed gives the same bits": all(
            torch.equal(again[name], value) for name, value in by_mode["block"].items()
        ),
        "other seeds give other masks": len({float(each) for each in losses}) == len(losses),
    }


class StagedTransport(ProcessGroupTransport):
    """Carries hops between processes that share one device: by memory of the host, and gloo.

    NCCL refuses two ranks on one device. A thread reads the outgoing tensor, after the device has
    computed it, and a wait fills the incoming one: as with NCCL, both belong to the hop in between.
    With ``late`` "arrivals", this takes longer; with "computations", whatever computes
    with the device's current stream does.
    """

    def __init__(self, ring: Ring, device: torch.device, late: str) -> None:
        super().__init__(ring.group)
        self._late = late
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "gyre check hops")

    def start(self, legs: Sequence[Leg], stream: Stream) -> list[tuple[Wait, str]]:
        """Start the legs as one batch."""
        if self._late == "computations":
            _delay()
        for leg in legs:
            if self._late and leg.arrives and leg.tensor.is_floating_point():
                leg.tensor.fill_(torch.nan)
        hosts = [
            torch.empty(leg.tensor.shape, dtype=leg.tensor.dtype, pin_memory=self._side is not None)
            for leg in legs
        ]
        queued = torch.cuda.current_stream().record_event() if self._side else None
        carried = self._thread.submit(self._carry, list(legs), hosts, stream, queued)
        what = " and ".join(leg.description for leg in legs)
        return [(partial(self._arrive, carried, list(legs), hosts), what)]

    def give_up(self) -> None:
        """Let this rank's threads go; the process group ends the waits of others."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _on_side(self) -> Any:
        """A context whose kernels run beside those that compute."""
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def _carry(self, legs: list[Leg], hosts: list[Tensor], stream: Stream, queued: Any) -> None:
        with self._on_side():
            if queued is not None:
                queued.wait(self._side)
            if self._late == "arrivals":
                _delay()
            for leg, host in zip(legs, hosts, strict=True):
                if not leg.arrives:
                    host.copy_(leg.tensor, non_blocking=True)
            if self._side is not None:
                self._side.synchronize()
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        works = [
            (dist.irecv if leg.arrives else dist.isend)(
                host.view(torch.uint8), group=self._group, tag=stream, **{
                    "group_src" if leg.arrives else "group_dst": (rank + leg.offset) % size
                }
            )
            for leg, host in zip(legs, hosts, strict=True)
        ]  # fmt: skip
        for work in works:
            assert work is not None
            work.wait()

    def _arrive(self, carried: "Future[None]", legs: list[Leg], hosts: list[Tensor]) -> None:
        carried.result()
        with self._on_side():
            for leg, host in zip(legs, hosts, strict=True):
                if leg.arrives:
                    leg.tensor.copy_(host, non_blocking=True)
            arrived = self._side.record_event() if self._side else None
        if arrived is not None:
            arrived.wait()


def _delay() -> None:
    """Let the current stream, or on a CPU this thread, rest for a moment."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # no public call delays it
    else:
        time.sleep(_REST_S)


class _PoisonedPool(BufferPool):
    """Fills returned buffers with NaN, so that a late reader computes NaN."""

    def put(self, buffer: Tensor) -> None:
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
        super().put(buffer)


@contextmanager
def hops_by(device: torch.device, *, staged: bool, late: str) -> Iterator[None]:
    """A context in which hops of the ring of all ranks are staged, if they are to be.

    With ``late`` they are, "arrivals" or "computations" are delayed, and buffers are NaN whenever
    they have no value.
    """
    ring = ring_of(make_mesh(device.type))
    before = ring.transport, ring.pool
    if staged or late:
        ring.transport = StagedTransport(ring, device, late)
    if late:
        ring.pool = _PoisonedPool()
    try:
        yield
    finally:
        if isinstance(ring.transport, StagedTransport):
            ring.transport.give_up()
        ring.transport, ring.pool = before


def hop_figures(device: torch.device) -> dict[str, float]:
    """Microseconds of the host for a small hop, and to start it, and bytes/s of large ones."""
    us, us_to_start = _us_of_hops(device, 1_024, 200)
    numel = 2**22
    return {
        "us": us,
        "us to start": us_to_start,
        "bytes_per_s": 4e6 * numel / _us_of_hops(device, numel, 8)[0],
    }


def _us_of_hops(device: torch.device, numel: int, num_hops: int) -> tuple[float, float]:
    """Microseconds of a hop of float32, and those to start it."""
    ring = ring_of(make_mesh(device.type))
    outgoing, incoming = (ring.pool.take(numel, torch.float32, device) for _ in range(2))
    for count in (3, num_hops):
        dist.barrier()
        _synchronize(device)
        began_s, in_start_s = time.perf_counter(), 0.0
        for _ in range(count):
            before_s = time.perf_counter()
            hop = ring.shift(outgoing, incoming, Direction.CLOCKWISE, Stream.WEIGHTS)
            in_start_s += time.perf_counter() - before_s
            hop.wait()
        _synchronize(device)
    elapsed_s = time.perf_counter() - began_s
    ring.pool.put(outgoing)
    ring.pool.put(incoming)
    return 1e6 * elapsed_s / num_hops, 1e6 * in_start_s / num_hops


def step_config(num_ranks: int) -> TrainConfig:
    """A GPT large enough to plan, and small enough for seconds."""
    return build(
        TrainConfig,
        {
            "run": {"out": "nowhere", "steps": 9},
            "data": {"dataset": "none", "batch_size": 2 * num_ranks, "sequence_length": 128},
            "model": {
                "vocab_size": 2_000, "num_layers": 4, "dim": 192, "num_heads": 6,
                "num_kv_heads": 6, "hidden_dim": 512, "max_seq_len": 128,
            },
            "memory": {"min_numel": 0, "recompute": "block"},
            "precision": {"compute_dtype": "float32", "grad_dtype": "float32"},
        },
    )  # fmt: skip


def _stepping(config: TrainConfig, device: torch.device) -> tuple[Stepper, Examples]:
    """A fresh model with its optimizer, and this rank's rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build_model(config, RankContext(rank, size, device, make_mesh(device.type)))
    examples = stand_in(config, config.data.batch_size // size, seed=0)
    return Stepper(model, config), examples.to(device)


def step_figures(device: torch.device) -> dict[str, float]:
    """Seconds of a step, without hops too, the share that the processor computes, and the peak."""
    config = step_config(dist.get_world_size())
    figures = {}

    def stay(ring: Ring, *_: Any) -> Hop:
        return Hop((), ring)

    stepper, examples = _stepping(config, device)
    for name in ("s", "s without hops"):
        with nullcontext() if name == "s" else patch.object(Ring, "shift", stay):
            took = []
            for step in range(5):
                dist.barrier()
                _synchronize(device)
                before_s, before_cpu_s = time.perf_counter(), time.thread_time()
                stepper.take(examples, step)
                _synchronize(device)
                took.append((time.perf_counter() - before_s, time.thread_time() - before_cpu_s))
            figures[name], busy_s = min(took[2:])
            figures.setdefault("busy", busy_s / figures[name])
    del stepper
    stepper, examples = _stepping(config, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        for step in range(2):
            stepper.take(examples, step)
        figures["peak"] = torch.cuda.max_memory_allocated()
    else:
        figures["peak"] = measure_step(stepper.model, config, examples).peak_bytes
    return figures


def synchronous_calls(device: torch.device) -> str:
    """Torch's error for a call in a dense step that waits for the device, or "nothing"."""
    stepper, examples = _stepping(step_config(dist.get_world_size()), device)
    for step in range(2):
        stepper.take(examples, step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        stepper.take(examples, 2)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "nothing"


def nccl_with_itself(device: torch.device) -> str:
    """An all-reduce, and a hop to the own rank, by NCCL in one process."""
    x, y = torch.arange(64.0, device=device), torch.empty(64, device=device)
    dist.all_reduce(x)
    operations = [dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, y, 0)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return "ok" if torch.equal(x, y) else "another value arrived"


def another_module(device: torch.device) -> str:
    """This rank's error when rank 0 calls another module than the others."""
    torch.manual_seed(0)
    layers = nn.ModuleList((nn.Linear(8, 12), nn.Linear(8, 12))).to(device)
    rotate_all(layers, mesh=make_mesh(device.type), min_numel=0)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    def act() -> None:
        layers[dist.get_rank() == 0](torch.ones(2, 8, device=device)).sum().backward()
        optimizer.step()

    return _error_of(act)


def killed(device: torch.device) -> str:
    """This rank's error when the last rank is killed in a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)).to(device)
    rotate_all(model, mesh=make_mesh(device.type), min_numel=0)
    x = torch.ones(2, 8, device=device)
    model(x).sum().backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def act() -> None:
        for _ in range(2):
            model(x).sum().backward()
        _synchronize(device)

    return _error_of(act)


def _error_of(act: Callable[[], None]) -> str:
    """The error of an act, and when it came; empty if none."""
    began_s = time.monotonic()
    try:
        act()
    except Exception as error:  # the check says which
        return f"{type(error).__name__} after {time.monotonic() - began_s:.1f} s: {error}"
    return ""


_NUM_LORA_STEPS, _KILLED_AT = 4, 2


@dataclass
class _Place:
    """Where the run is in its data; a rank may be killed while it is saved."""

    step: int = 0
    kills: bool = False

    def state_dict(self) -> dict[str, Any]:
        if self.kills and self.step == _KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"cursor": self.step.to_bytes(4, "big")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = int.from_bytes(state["cursor"], "big")


def lora_run(device: torch.device, folder: str, killed_in: str) -> str:
    """A digest of adapters that were trained with a checkpoint after each step, from the latest.

    The last rank is killed in the third "step", or in the "save" before it; "" for never.
    """
    is_culprit = dist.get_rank() == dist.get_world_size() - 1
    model = _rotated("LoRA", device, RotationPolicy(recompute="block"))
    trainable = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3)
    place = _Place(kills=is_culprit and killed_in == "save")
    config = step_config(dist.get_world_size())  # a checkpoint names some model
    checkpoints = Checkpoints(replace(config, run=replace(config.run, out=folder)))
    state, saved = TrainState(model, [optimizer], place), Path(folder) / "checkpoints"
    if any(saved.glob("step-*")):
        checkpoints.load(state, latest(saved))
    while place.step < _NUM_LORA_STEPS:
        loss = model(_part(tokens_of(place.step, device)))
        if is_culprit and killed_in == "step" and place.step == _KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        place.step += 1
        checkpoints.save(state, place.step)
    digest = blake2b(digest_size=8)
    for _, parameter in sorted(model.named_parameters()):
        digest.update(_whole(parameter.detach()).cpu().numpy().tobytes())
    return digest.hexdigest()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
