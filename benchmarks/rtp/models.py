"""Families of `transformers` at toy width: rotation beside FSDP2 and DDP, on gloo ranks.

    python -m benchmarks.rtp.models [--ranks 2] [--rounds 5] [--families Llama T5]
        [--min-numel 0] [--recompute [blocks | layers]] [--device cuda] [--widths real]

All take turns in the same processes, round by round: the ranks' mean CPU time of a step, the time
until the last rank has ended it, and the live bytes of rank 0 at the peak of another step. FSDP2
wraps each layer, or each sub-block: attention, MLP or other part of a layer that has matrices.
Embedding and head are wrapped, too, where they are not tied. Times and peaks are beside each of
these two wraps, and bytes beside the one with the smaller peak. Rotation finds blocks. The last
row is Llama with LoRA on all linear layers. With `--min-numel`,
modules whose largest parameter has fewer elements are replicated, 0 for none.
With `--recompute` rotation recomputes blocks, or whole
layers, and torch's checkpoint is around what FSDP2 wraps, and around as much of DDP. With
`--device cuda` each rank has a GPU of its own, with NCCL: a step ends when its kernels have, and
the peak is that of CUDA's allocator. `--rounds 0` counts bytes alone. For `--widths real`, see
`benchmarks.rtp.real_widths`.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gyre_trainer.accounting.baselines import data_parallel, sub_blocks
from gyre_trainer.accounting.counters import Counters
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.causal_loss import takes_causal_loss
from gyre_trainer.rotate import RotationPolicy, causal_loss, rotate_all
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.rtp.ranks import run_on_ranks
from benchmarks.rtp.real_widths import MODELS, print_table
from tests.distributed.models.families import FAMILIES, made

LORA = "Llama, LoRA"
_NUM_LAYERS, _WIDTH, _NUM_SEQUENCES, _NUM_TOKENS = 2, 256, 2, 64
_VOCABULARY = 2048
_COMMON = {
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_hidden_layers": _NUM_LAYERS,
    "vocab_size": _VOCABULARY,
}
_HEADS = {"head_dim": _WIDTH // 4}
_SIZES: dict[str, dict[str, int]] = {
    "Qwen3": _COMMON | _HEADS,
    "Gemma2": _COMMON | _HEADS,
    "Bert": _COMMON | {"max_position_embeddings": _NUM_TOKENS},
    "GPT2": {"n_embd": _WIDTH, "n_layer": _NUM_LAYERS, "n_positions": _NUM_TOKENS}
    | {"vocab_size": _VOCABULARY},
    "T5": {"d_model": _WIDTH, "d_kv": _WIDTH // 4, "d_ff": 2 * _WIDTH, "num_layers": _NUM_LAYERS}
    | {"vocab_size": _VOCABULARY},
}
_NUM_WARM_UP_STEPS = 2
_PER_SUB_BLOCK, _PER_LAYER = "FSDP2 per sub-block", "FSDP2 per layer"
_WRAPS = (_PER_SUB_BLOCK, _PER_LAYER)
_OTHERS = (*_WRAPS, "DDP")
Build = Callable[[str], Any]
# CPU and passed seconds of each round, peak bytes, bytes sent
Figures = tuple[list[tuple[float, float]], int, int]


def sizes_of(family: str) -> dict[str, int]:
    """The keys of a family's configuration that say how large it is here."""
    return _SIZES.get(family, _COMMON)


def _built(family: str, device: str = "cpu") -> Any:
    name = "Llama" if family == LORA else family
    model = made(name, **sizes_of(name)).float()
    if family == LORA:
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    return model.to(device)


def _rotated(
    family: str, min_numel: int | None = None, *, recomputes: str | None = None, device: str = "cpu"
) -> Any:
    model = _built(family, device)
    policy = RotationPolicy(
        recompute="layer" if recomputes == "layers" else "block" if recomputes else "none",
    )
    # adapters stay outside of the layers that rotate, so those rotate one by one
    rotate_all(
        model,
        mesh=make_mesh(device),
        policy=policy,
        find_blocks=family != LORA,
        min_numel=min_numel,
    )
    return model


def _fully_sharded(
    family: str, *, per_layer: bool = False, recomputes: str | None = None, device: str = "cpu"
) -> Any:
    model = _built(family, device)
    _call_every_expert(model)
    wrapped = list(_layers(model)) if per_layer else _parts_with_matrices(model)
    if recomputes:
        _recompute(wrapped)
    for part in wrapped:
        fully_shard(part)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if ends[0].weight is not ends[1].weight:
        for end in ends:
            fully_shard(end)
    fully_shard(model)
    return model


def _call_every_expert(model: nn.Module) -> None:
    """Let each list of experts be called with no tokens once more.

    FSDP2 reduces the gradients of those parameters of a unit that have one. Where tokens of one
    rank miss an expert that another rank's tokens choose, gloo ends the process: "Received data
    size doesn't match expected size".
    """
    for module in model.modules():
        if isinstance(getattr(module, "experts", None), nn.ModuleList):
            module.register_forward_hook(_with_every_expert)


def _with_every_expert(module: Any, args: Any, output: Any) -> Any:
    no_tokens = args[0].flatten(0, -2)[:0]
    nothing = torch.stack([expert(no_tokens).sum() for expert in module.experts]).sum()
    hidden, *rest = output
    return hidden + nothing, *rest


def _recompute(parts: Iterable[nn.Module]) -> None:
    for part in parts:
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)


def _parts_with_matrices(model: nn.Module) -> list[nn.Module]:
    return [part for layer in _layers(model) for part in sub_blocks(layer)]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


def _with_ddp(family: str, *, recomputes: str | None, device: str) -> Any:
    model = _built(family, device)
    if recomputes:
        _recompute(list(_layers(model)) if recomputes == "layers" else _parts_with_matrices(model))
    return DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)


def _with_counted_ddp(family: str, *, recomputes: str | None, device: str) -> Any:
    """DDP whose buckets are seen: those of torch's C++ are not."""
    model = _built(family, device)
    _call_every_expert(model)
    if recomputes:
        _recompute(list(_layers(model)) if recomputes == "layers" else _parts_with_matrices(model))
    data_parallel(
        nn.ParameterList(p for p in model.parameters() if p.requires_grad), make_mesh(device)
    )
    return model


@dataclass(frozen=True, slots=True)
class _Way:
    """The common part of all contenders of a run, by the options."""

    min_numel: int | None
    recomputes: str | None
    device: str


def _contenders(way: _Way, ddp: Callable[..., Any]) -> dict[str, Build]:
    alike: dict[str, Any] = {"recomputes": way.recomputes, "device": way.device}
    return {
        "rotation": partial(_rotated, min_numel=way.min_numel, **alike),
        _PER_SUB_BLOCK: partial(_fully_sharded, per_layer=False, **alike),
        _PER_LAYER: partial(_fully_sharded, per_layer=True, **alike),
        "DDP": partial(ddp, **alike),
    }


class _Training:
    """One contender's model and optimizer."""

    def __init__(self, model: Any, rows: torch.Tensor) -> None:
        self.model, self.rows = model, rows
        trained = [each for each in model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained)

    def step(self) -> tuple[float, float]:
        """The CPU seconds of one step, and the seconds that it took."""
        dist.barrier()
        self._synchronize()
        before, begin = time.process_time(), time.perf_counter()
        batch = {"input_ids": self.rows, "labels": self.rows}
        by_slices = takes_causal_loss(self.model)  # where it rotates, as its users would
        loss = causal_loss(self.model, batch) if by_slices else self.model(**batch).loss
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._synchronize()
        return time.process_time() - before, time.perf_counter() - begin

    def _synchronize(self) -> None:
        if self.rows.is_cuda:
            torch.cuda.synchronize()


def print_rows(families: list[str], num_rounds: int, way: _Way) -> None:
    """Measure on this rank; the first one prints each family's row as soon as it is known."""
    # The ring's buffers stay as large as the largest family's, which comes last.
    for family in sorted(families, key="GptOss".__eq__):
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, _measured(family, num_rounds, way))
        if dist.get_rank() == 0:
            print(_row(family, found), flush=True)


def _measured(family: str, num_rounds: int, way: _Way) -> dict[str, Figures]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randint(1, _VOCABULARY, (_NUM_SEQUENCES, _NUM_TOKENS), generator=generator)
    rows = rows.to(way.device)
    counted = _contenders(way, _with_counted_ddp)
    costs = {label: _counted(partial(build, family), rows) for label, build in counted.items()}
    contenders = _contenders(way, _with_ddp)
    trainings = {label: _Training(build(family), rows) for label, build in contenders.items()}
    seconds: dict[str, list[tuple[float, float]]] = {label: [] for label in trainings}
    for _ in range(_NUM_WARM_UP_STEPS + num_rounds if num_rounds else 0):
        for label, training in trainings.items():
            seconds[label].append(training.step())
    return {label: (seconds[label][_NUM_WARM_UP_STEPS:], *costs[label]) for label in seconds}


def _counted(build: Callable[[], Any], rows: torch.Tensor) -> tuple[int, int]:
    """Bytes alive at the peak of a second step, and bytes sent in it.

    On CUDA they are those that the allocator has given out, the ring's buffers included.
    """
    with Counters() as live:
        training = _Training(build(), rows)
        training.step()
        live.mark("step")
        before = live.sent_bytes
        if rows.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        training.step()
        peak = (
            torch.cuda.max_memory_allocated()
            if rows.is_cuda
            else live.timeline().since("step").peak_bytes
        )
        return peak, live.sent_bytes - before


def _row(family: str, ranks: list[dict[str, Figures]]) -> str:
    cpu, passed = {}, {}
    for label in ranks[0]:
        rounds = list(zip(*(rank[label][0] for rank in ranks), strict=True))
        cpu[label] = [statistics.mean(used for used, _ in each) for each in rounds]
        passed[label] = [max(took for _, took in each) for each in rounds]
    peaks = {label: peak for label, (_, peak, _) in ranks[0].items()}
    sent = {label: num_bytes for label, (_, _, num_bytes) in ranks[0].items()}
    own, by_peak = peaks["rotation"], min(_WRAPS, key=peaks.__getitem__)
    cells = [
        family,
        *_to_others(cpu),
        *_to_others(passed),
        f"{own / 2**20:.1f}",
        *(f"{own / peaks[label]:.2f}" for label in _OTHERS),
        f"{sent['rotation'] / sent[by_peak]:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _to_others(seconds: Mapping[str, list[float]]) -> list[str]:
    """Rotation's median in ms, and its ratios to the others'."""
    own = seconds["rotation"]
    if not own:
        return ["-"] * (1 + len(_OTHERS))
    ratios = [
        statistics.median(a / b for a, b in zip(own, seconds[label], strict=True))
        for label in _OTHERS
    ]
    return [f"{1e3 * statistics.median(own):.0f}", *(f"{ratio:.2f}" for ratio in ratios)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*FAMILIES, LORA]
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--min-numel", type=int)
    parser.add_argument("--recompute", nargs="?", const="blocks", choices=("blocks", "layers"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--families", nargs="+", choices=every, default=every)
    parser.add_argument("--widths", choices=("toy", "real"), default="toy")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    options = parser.parse_args(arguments)
    if options.widths == "real":
        print_table(options.models, options.tokens, options.ranks)
        return
    print(f"{options.ranks} ranks, load average {os.getloadavg()[0]:.1f}\n")
    others = " | ".join(f"to {label}" for label in _OTHERS)
    figures = " | ".join(f"{what} | {others}" for what in ("CPU, ms", "step, ms", "peak, MiB"))
    print(f"| | {figures} | sent to FSDP2's |")
    print("|---" + "|---:" * 13 + "|", flush=True)
    way = _Way(options.min_numel, options.recompute, options.device)
    run_on_ranks(
        options.ranks, print_rows, options.families, options.rounds, way, device=options.device
    )


if __name__ == "__main__":
    main()
