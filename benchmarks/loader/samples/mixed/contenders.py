"""All loaders of the comparison, and the features that each lacks."""

from collections.abc import Sequence

from benchmarks.loader.samples.mixed.scenario import Contender

_NO_PACKING = "none of its own"
_BEFORE = "only before it is written"

CONTENDERS: Sequence[Contender] = (
    Contender("Gyre", "by_gyre", "gyre-ml", "gyre_client"),
    Contender("datasets, prepared as a whole", "by_datasets", "datasets", "datasets"),
    Contender("datasets, streamed", "by_datasets_streamed", "datasets", "datasets"),
    Contender(
        "torchdata, ids of each rank",
        "by_nodes",
        "torchdata",
        "torchdata",
        {"is_packed": _NO_PACKING},
    ),
    Contender(
        "torchdata, global batches on each rank",
        "by_nodes_whole",
        "torchdata",
        "torchdata",
        {"is_packed": _NO_PACKING},
    ),
    Contender(
        "webdataset", "by_webdataset", "webdataset", "webdataset", {"is_packed": _NO_PACKING}
    ),
    Contender(
        "mosaicml-streaming",
        "by_streaming",
        "mosaicml-streaming",
        "streaming",
        {"is_packed": _NO_PACKING, "is_filtered": _BEFORE},
    ),
    Contender(
        "litdata",
        "by_litdata",
        "litdata",
        "litdata",
        {"is_packed": _NO_PACKING, "is_filtered": _BEFORE},
    ),
    Contender("Megatron Energon", "by_energon", "megatron-energon", "megatron.energon"),
    Contender("torchtitan", "by_torchtitan", "torchtitan", "torchtitan", is_always_packed=True),
    Contender("Grain", "by_grain", "grain", "grain"),
)
