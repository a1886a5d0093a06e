"""Megatron Energon: a blended metadataset, a task encoder that filters and packs, savable loaders.

Its page "Reproducible Scaling" asks for the same number of workers over all ranks, and for batches
that are a multiple of theirs: 4 workers here, with micro-batches of 3. States go to another number
of ranks as `energon checkpoint redist` has them.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.loader.samples.mixed.documents import (
    LENGTH,
    NAMES,
    SEED,
    G,
    Sample,
    Variant,
    length_of,
    pack,
)
from benchmarks.loader.samples.mixed.files import write_tars
from benchmarks.loader.samples.mixed.scenario import Rank

NUM_WORKERS = 4  # of all ranks together
MICRO = G // NUM_WORKERS
_BLEND = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {{weight: {0}, path: ./tar-a}}
      - {{weight: {1}, path: ./tar-b}}
"""
_CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def write(folder: Path) -> None:
    """Indexes beside the tar shards of webdataset."""
    energon = importlib.import_module("megatron.energon")
    write_tars(folder)
    for name in NAMES:
        parent = folder / f"tar-{name}"
        energon.BaseWebdatasetFactory.prepare_dataset(
            energon.epathlib.EPath(parent),
            [path.name for path in sorted(parent.glob("*.tar"))],
            split_parts_ratio=[("train", 1.0)],
            workers=1,
        )
        (parent / ".nv-meta/dataset.yaml").write_text(_CRUDE)


def reader(rank: Rank) -> "EnergonReader":
    """A rank's workers."""
    energon = importlib.import_module("megatron.energon")
    workers = energon.WorkerConfig(
        rank=rank.rank,
        world_size=rank.world_size,
        num_workers=NUM_WORKERS // rank.world_size,
        seed_offset=SEED,
    )
    path = rank.folder / f"blend-{rank.job}-{rank.first_step}-{rank.rank}.yaml"
    path.write_text(_BLEND.format(*rank.weights))
    dataset = energon.get_train_dataset(
        path,
        worker_config=workers,
        batch_size=MICRO,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        packing_buffer_size=60 if rank.variant.is_packed else None,
        task_encoder=_encoder(energon, rank.variant),
    )
    loader = energon.get_savable_loader(dataset)
    if rank.states:
        loader.restore_state_rank(_redistributed(rank))
    return EnergonReader(loader, NUM_WORKERS // rank.world_size)


def _redistributed(rank: Rank) -> Any:
    """This rank's part of all workers' states, in their order, as `redist` shares them out."""
    workers = [each for state in rank.states for each in state.worker_states]
    count = len(workers) // rank.world_size
    kind = importlib.import_module("megatron.energon.savable_loader").SavableDataLoaderState
    return kind(
        worker_states=workers[rank.rank * count : (rank.rank + 1) * count],
        next_worker_id=rank.states[0].next_worker_id if count == NUM_WORKERS else 0,
        micro_batch_size=rank.states[0].micro_batch_size,
    )


def _encoder(energon: Any, variant: Variant) -> Any:
    base = importlib.import_module("megatron.energon.task_encoder")
    stateless = energon.stateless

    class Encoder(energon.DefaultTaskEncoder):  # type: ignore[misc]
        cookers = (base.Cooker(stateless(_cooked)),)

        @stateless  # type: ignore[untyped-decorator]
        def encode_sample(self, sample: Any) -> Any:
            if not variant.passes(int(sample.text)):
                raise energon.SkipSample
            return sample

        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            by_id = {int(each.text): each for each in samples}
            if len(by_id) < len(samples):  # the buffer has a document twice
                return [[each] for each in samples]
            return [[by_id[each] for each in its] for its in pack(list(by_id))]

        @stateless  # type: ignore[untyped-decorator]
        def pack_selected_samples(self, samples: list[Any]) -> Any:
            assert sum(length_of(int(each.text)) for each in samples) <= LENGTH
            text = " ".join(each.text for each in samples)
            return energon.TextSample.derive_from(samples[0], text=text)

        @stateless  # type: ignore[untyped-decorator]
        def batch(self, samples: list[Any]) -> list[Sample]:
            return [tuple(map(int, each.text.split())) for each in samples]

    return Encoder() if variant.is_packed else _unpacked(Encoder)()


def _unpacked(encoder: Any) -> Any:
    """The same without its packing."""
    base = importlib.import_module("megatron.energon").DefaultTaskEncoder
    names = ("select_samples_to_pack", "pack_selected_samples")
    return type("Unpacked", (encoder,), {name: getattr(base, name) for name in names})


def _cooked(sample: Any) -> Any:
    energon = importlib.import_module("megatron.energon")
    return energon.TextSample(**energon.basic_sample_keys(sample), text=str(sample["txt"]))


class EnergonReader:
    """See `Reader`."""

    def __init__(self, loader: Any, num_micro: int) -> None:
        """Read nothing yet."""
        self._loader, self._num_micro = loader, num_micro

    def steps(self) -> Iterator[list[Sample]]:
        """See `Reader.steps`."""
        batches = iter(self._loader)
        while True:
            yield [sample for _ in range(self._num_micro) for sample in next(batches)]

    def state(self) -> Any:
        """See `Reader.state`."""
        return self._loader.save_state_rank()
