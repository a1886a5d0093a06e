"""Live bytes are exact: each allocation, view, resize and graph is counted to the byte.

This holds for real and for fake tensors.
"""

import gc
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from gyre_trainer.accounting.counters import CATEGORIES, Category, Counters
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

KIB = 1024


@pytest.fixture(params=["real", "fake"])
def live(request: pytest.FixtureRequest) -> Iterator[Counters]:
    with FakeTensorMode() if request.param == "fake" else nullcontext(), Counters() as counter:
        yield counter


def kib(num_kib: int) -> Tensor:
    return torch.empty(num_kib * KIB // 4)


def test_a_storage_counts_from_its_allocation_to_its_release(live: Counters) -> None:
    one = kib(3)
    assert live.live_bytes == 3 * KIB
    other = kib(5)
    assert live.live_bytes == 8 * KIB
    del one
    assert live.live_bytes == 5 * KIB
    del other
    assert (live.live_bytes, live.peak_bytes) == (0, 8 * KIB)


def test_views_and_writes_in_place_cost_nothing_and_keep_the_storage(live: Counters) -> None:
    tensor = kib(4)
    view = tensor.view(-1, 2)[3:, 1].detach()
    tensor.add_(1).zero_()
    tensor[:8].copy_(tensor[8:16])
    assert live.peak_bytes == 4 * KIB
    del tensor
    assert live.live_bytes == 4 * KIB
    del view
    assert live.live_bytes == 0


def test_a_view_that_is_expanded_counts_what_lies_in_memory(live: Counters) -> None:
    wide = torch.empty(4, 1).expand(4, 1000)
    assert live.live_bytes == 16
    copied = wide.contiguous()
    assert live.live_bytes == 16 + copied.nbytes == 16 + 16000


def test_resizing_a_storage_in_place_is_seen(live: Counters) -> None:
    tensor = kib(4)
    tensor.untyped_storage().resize_(0)
    assert live.live_bytes == 0
    tensor.untyped_storage().resize_(6 * KIB)
    assert live.live_bytes == 6 * KIB
    del tensor
    assert live.live_bytes == 0
    assert live.timeline().events == ["aten.empty.memory_format", "resize", "resize", "release"]


def test_an_operator_that_resizes_its_output_is_seen(live: Counters) -> None:
    out = torch.empty(0)
    torch.add(kib(2), 1, out=out)
    assert (live.live_bytes, live.peak_bytes) == (2 * KIB, 4 * KIB)
    out.resize_(KIB)
    assert live.live_bytes == 4 * KIB


def test_tensors_saved_by_autograd_count_until_the_backward(live: Counters) -> None:
    weight = kib(1).requires_grad_()
    output = weight.exp().exp().sum()  # exp keeps its result: two of them
    assert live.live_bytes == 3 * KIB + 4
    output.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert live.live_bytes == 2 * KIB + 4


def test_recomputation_frees_the_tensors_inside_until_backward(live: Counters) -> None:
    weight = kib(1).requires_grad_()
    output = checkpoint(
        lambda x: x.exp().exp().exp(), weight, use_reentrant=False, preserve_rng_state=False
    )
    assert live.live_bytes == 2 * KIB
    del output
    assert live.live_bytes == KIB


def test_a_tensor_in_a_reference_cycle_counts_until_it_is_collected(live: Counters) -> None:
    gc.collect()
    cycle: list[object] = [kib(2)]
    cycle.append(cycle)
    del cycle
    assert live.live_bytes == 2 * KIB
    gc.collect()
    assert live.live_bytes == 0


def test_addresses_that_are_used_again_are_new_storages(live: Counters) -> None:
    for num_kib in (1, 2, 3) * 100:
        assert kib(num_kib).nbytes == live.live_bytes
    assert live.live_bytes == 0
    assert live.timeline().live.min() == 0


def test_a_label_holds_from_the_first_moment_on(live: Counters) -> None:
    weight = kib(1).requires_grad_()
    live.label(Category.PARAMETERS, [weight])
    (weight * weight).sum().backward()  # type: ignore[no-untyped-call]
    live.label(Category.GRADIENTS, [weight.grad, None])
    timeline = live.timeline()
    columns = dict(zip(CATEGORIES, timeline.live.T, strict=True))
    assert set(columns[Category.PARAMETERS]) == {KIB}
    assert columns[Category.GRADIENTS][-1] == KIB
    assert timeline.at(-1) == dict.fromkeys(CATEGORIES, 0) | {
        Category.PARAMETERS: KIB,
        Category.GRADIENTS: KIB,
    }
    assert sum(timeline.peak().values()) == timeline.peak_bytes == live.peak_bytes


def test_an_unlabelled_storage_has_the_category_of_its_time(live: Counters) -> None:
    before = kib(1)
    with live.during(Category.OPTIMIZER):
        state = kib(2)
        with live.during(Category.COMMUNICATION):
            buffer = kib(4)
        rest = kib(8)
    assert live.timeline().at(-1) == dict.fromkeys(CATEGORIES, 0) | {
        Category.ACTIVATIONS: before.nbytes,
        Category.OPTIMIZER: state.nbytes + rest.nbytes,
        Category.COMMUNICATION: buffer.nbytes,
    }


def test_marks_name_moments_and_cut_the_timeline(live: Counters) -> None:
    live.mark("first")
    kept = kib(1)
    live.mark("step")
    large = kib(9)
    del large
    live.mark("step")
    kib(2)
    timeline = live.timeline()
    assert [event for event in timeline.events if event in ("first", "step")] == [
        "first",
        "step",
        "step",
    ]
    assert timeline.peak_bytes == 10 * KIB
    last = timeline.since("step")
    assert (last.events[0], last.peak_bytes) == ("step", 2 * KIB + kept.nbytes)
    assert last.live.sum(1).tolist() == [KIB, 3 * KIB, KIB]


def test_an_older_storage_counts_from_its_first_label_or_use() -> None:
    labelled, touched, untouched = kib(1), kib(2), kib(4)
    with Counters() as live:
        live.label(Category.PARAMETERS, [labelled, labelled[3:]])
        assert live.live_bytes == KIB
        touched.add_(1)
        assert live.live_bytes == 3 * KIB
    del untouched


def test_releases_count_after_the_context_and_the_patch_is_gone() -> None:
    before = torch.UntypedStorage.resize_
    with Counters() as live:
        tensor = kib(2)
    assert torch.UntypedStorage.resize_ is before
    other = kib(3)
    assert live.live_bytes == 2 * KIB
    del tensor
    assert live.live_bytes == 0
    del other


def test_counters_may_nest_and_each_sees_all() -> None:
    with Counters() as outer:
        with Counters() as inner:
            tensor = kib(1)
            tensor.untyped_storage().resize_(2 * KIB)
        assert (outer.live_bytes, inner.live_bytes) == (2 * KIB, 2 * KIB)


def test_a_wrapper_counts_what_it_wraps_and_what_its_operators_make_inside() -> None:
    with Counters() as live:
        wrapper = TwoTensor(kib(1), kib(1))  # type: ignore[no-untyped-call]
        live.label(Category.PARAMETERS, [wrapper])
        assert live.timeline().at(-1)[Category.PARAMETERS] == 2 * KIB
        doubled = wrapper * 2
        assert live.live_bytes == 4 * KIB
        del doubled
        assert live.live_bytes == 2 * KIB


def test_nothing_lies_behind_meta_tensors() -> None:
    with Counters() as live:
        kept = torch.empty(1000, device="meta") + 1
        assert (live.live_bytes, kept.shape) == (0, (1000,))


def test_a_training_step_leaves_the_bytes_that_the_formula_gives(live: Counters) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    live.label(Category.PARAMETERS, model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.empty(8, 64)
    model(x).sum().backward()
    live.label(Category.GRADIENTS, (parameter.grad for parameter in model.parameters()))
    with live.during(Category.OPTIMIZER):
        optimizer.step()
    steps = 4 * len(list(model.parameters()))
    assert live.timeline().at(-1) == dict.fromkeys(CATEGORIES, 0) | {
        Category.PARAMETERS: num_bytes,
        Category.GRADIENTS: num_bytes,
        Category.OPTIMIZER: 2 * num_bytes + steps,
        Category.ACTIVATIONS: x.nbytes,
    }
    optimizer.zero_grad()
    assert live.live_bytes == 3 * num_bytes + steps + x.nbytes
