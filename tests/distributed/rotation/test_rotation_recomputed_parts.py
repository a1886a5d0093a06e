"""Modules whose layers rotate one by one are computed again in backward: exactly, and for free."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import RotationPolicy, Rules, plan_of, rotate_all
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.conftest import StartRanks
from tests.distributed.settled_bytes import SettledBytes
from tests.distributed.training import whole

BATCH, TIME, DIM = 6, 5, 24
POLICY = RotationPolicy(recompute=True)


class Part(nn.Module):
    """Two layers, with activations and random numbers between them and after the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 36), nn.Linear(36, DIM)
        self.scale = nn.Parameter(torch.rand(36))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, scales: dict[str, Tensor]) -> Tensor:
        h = torch.sigmoid(self.up(x)) * self.scale
        y: Tensor = self.down(self.dropout(h).exp())
        output: Tensor = self.dropout(y.tanh()) * scales["of output"]
        return output


class ReadsLayer(Part):
    """Reads the weight of a layer that stays whole, and takes its arguments by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(DIM, 36)

    def forward(self, x: Tensor, scales: dict[str, Tensor]) -> Tensor:
        h = self.up(x).relu() * torch.nn.functional.linear(x, self.read.weight)
        return super().forward(x=self.down(h), scales=scales)


class WritesToOutputs(Part):
    """Writes to what one layer returned, and returns what the other one did."""

    def forward(self, x: Tensor, scales: dict[str, Tensor]) -> Tensor:
        h = self.up(x)
        h.mul_(2).sin_()
        y: Tensor = self.down(h.exp())
        return y


class Frozen(Part):
    """Only what lies between the layers is trained, as with adapters."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.up, self.down):
            layer.requires_grad_(False)


class Model(nn.Module):
    """Parts in a list, one of them called twice; other activations around them.

    Attributes:
        checkpointed: whether torch's own checkpoint is around each part and its norm.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(make() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.head = nn.Linear(DIM, DIM)
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.linspace(0.5, 1.5, DIM, dtype=x.dtype)
        for place in (0, 1, 0):
            if self.checkpointed:
                x = checkpoint(self._layer, x, place, scale, use_reentrant=False)
            else:
                x = self._layer(x, place, scale)
        output: Tensor = self.head(x)
        return output

    def _layer(self, x: Tensor, place: int, scale: Tensor) -> Tensor:
        output: Tensor = self.parts[place](self.norms[place](x), scales={"of output": scale})
        output += x  # to what the part returned
        return output


def made(part: Callable[[], nn.Module], policy: RotationPolicy) -> Any:
    torch.manual_seed(1)
    model = Model(part)
    rules: Rules | None = {"*.read": None} if part is ReadsLayer else None
    rotate_all(model, mesh=make_mesh("cpu"), policy=policy, find_blocks=False, rules=rules)
    return model


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(2 + dist.get_rank())
    return torch.randn(BATCH, TIME, DIM, generator=generator)


def step(model: Any) -> tuple[dict[str, Tensor], int, int, int]:
    """Gradients of a second step; bytes alive after its forward and its backward; bytes sent."""
    x = inputs()
    model(x).square().mean().backward()
    model.zero_grad()
    ring = ring_of(make_mesh("cpu"))
    before = ring.bytes_sent
    torch.manual_seed(3)
    with SettledBytes() as live:
        loss = model(x).square().mean()
        after_forward = live.total
        loss.backward()
        gc.collect()
        after_backward = live.settled()
    grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return grads, after_forward, after_backward, ring.bytes_sent - before


def compared(part: Callable[[], nn.Module], *, checkpointed: bool) -> tuple[bool, bool, int, int]:
    """Whether bits agree and nothing is left; the bytes that are kept and sent, less those before.

    Before, with the same policy but for `recompute_parts`.
    """
    models = [made(part, RotationPolicy(recompute=True, recompute_parts=False)), made(part, POLICY)]
    for model in models:
        model.checkpointed = checkpointed
    (expected, kept, left, sent), found = map(step, models)
    assert found[0].keys() == expected.keys()
    same = all(torch.equal(found[0][name], expected[name]) for name in expected)
    return same, found[2] <= left, found[1] - kept, found[3] - sent


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("part", [Part, ReadsLayer, Frozen])
def test_a_part_is_computed_again_without_another_hop(
    ranks: StartRanks, num_ranks: int, part: type[Part]
) -> None:
    for same, left, kept, sent in ranks(num_ranks).run(_compared, part, False):
        assert same
        assert left
        assert kept < -BATCH * TIME * DIM * 4
        assert sent == 0


def test_layers_run_again_whose_outputs_were_written_to(ranks: StartRanks) -> None:
    for same, left, _, sent in ranks(2).run(_compared, WritesToOutputs, False):
        assert same
        assert left
        assert sent == 3 * 4 * (DIM + 1) * 18  # `up`, in each of three calls


def test_torchs_own_checkpoint_drops_what_a_part_keeps(ranks: StartRanks) -> None:
    for same, left, kept, sent in ranks(2).run(_compared, Part, True):
        assert same
        assert left
        assert abs(kept) <= 64 * 6  # empty tensors apart, only inputs of layers are kept
        assert sent == 0


def _compared(part: Callable[[], nn.Module], checkpointed: bool) -> tuple[bool, bool, int, int]:
    return compared(part, checkpointed=checkpointed)


class Counts(Part):
    """Writes to a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scales: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return super().forward(x, scales)


class WritesToArgument(Part):
    """Writes to an argument that takes no gradient."""

    def forward(self, x: Tensor, scales: dict[str, Tensor]) -> Tensor:
        y = super().forward(x, scales)
        scales["of output"].add_(0)
        return y


class Normalised(Part):
    """Has statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(TIME)

    def forward(self, x: Tensor, scales: dict[str, Tensor]) -> Tensor:
        return super().forward(self.norm(x), scales)


class Overwrites(Part):
    """Writes to a tensor that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"of calls": torch.ones(DIM)}

    def forward(self, x: Tensor, scales: dict[str, Tensor]) -> Tensor:
        y = super().forward(x * self.state["of calls"], scales)
        self.state["of calls"].mul_(0.5)
        return y


class Appends(Part):
    """Reads and changes a list and a dict that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.kept: dict[str, list[Tensor]] = {"means": []}

    def forward(self, x: Tensor, scales: dict[str, Tensor]) -> Tensor:
        x = x * (1 + len(self.seen)) + sum(mean for mean in self.kept["means"])
        self.seen.append(1.0)
        self.kept["means"].append(x.detach().mean())
        return super().forward(x, scales)


def off_with_contents() -> tuple[bool, list[int]]:
    """Whether gradients are those without recomputation, and how much the parts have kept."""
    grads, lengths = [], []
    for recomputes in (False, True):
        model = made(Appends, RotationPolicy(recompute=True, recompute_parts=recomputes))
        grads.append(step(model)[0])
        lengths += [len(part.seen) + len(part.kept["means"]) for part in model.parts]
    return all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0]), lengths


def test_lists_and_dicts_have_their_contents_of_before_the_call(ranks: StartRanks) -> None:
    for same, lengths in ranks(2).run(off_with_contents):
        assert same
        assert lengths == [8, 4, 8, 4]


class TakesObject(Part):
    """Takes an object that it may change."""

    def forward(self, x: Tensor, scales: dict[str, Tensor], seen: Any = None) -> Tensor:
        if seen is not None:
            seen.calls += 1
        return super().forward(x, scales)


class Seen:
    calls = 0


def refusals() -> list[str]:
    found = []
    for part in (Counts, WritesToArgument, Overwrites):
        model = made(part, POLICY)
        try:
            model(inputs())
        except RotationError as error:
            found.append(str(error))
        made(part, RotationPolicy(recompute=True, recompute_parts=False))(inputs())
    return found


def test_parts_that_write_to_what_they_read_are_refused_by_name(ranks: StartRanks) -> None:
    for messages in ranks(2).run(refusals):
        names = "Counts", "WritesToArgument", "Overwrites"
        for message, name in zip(messages, names, strict=True):
            assert f"parts.0 ({name}) writes to" in message
            assert "recompute_parts=False" in message


def plans() -> list[Any]:
    return [plan_of(made(part, POLICY)) for part in (Part, Normalised)]


def test_the_plan_says_what_is_computed_again(ranks: StartRanks) -> None:
    for plan, normalised in ranks(2).run(plans):
        assert plan.recomputed == (("parts.0", "Part"), ("parts.1", "Part"))
        assert str(plan).endswith(
            "Part: computed again in backward around what rotates: parts.0 and 1 more"
        )
        assert normalised.recomputed == ()


def calls_with_an_object() -> tuple[int, list[str]]:
    model, seen = made(TakesObject, POLICY), Seen()
    x, scales = inputs(), {"of output": torch.ones(DIM)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.parts[0](x, scales, seen=seen).sum().backward()
    with torch.no_grad():
        model.parts[0](x, scales, seen=seen)
    return seen.calls, [str(each.message) for each in caught]


def test_a_call_with_an_object_keeps_its_activations(ranks: StartRanks) -> None:
    for calls, messages in ranks(2).run(calls_with_an_object):
        assert calls == 2
        assert len(messages) == 1
        assert "TakesObject is called with a Seen" in messages[0]


def gradients(model: Any) -> dict[str, Tensor]:
    """Those of a second step; the first one may be none of a compiler's."""
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(3)
        model(inputs()).square().mean().backward()
    names = {id(p): n.removeprefix("_orig_mod.") for n, p in model.named_parameters()}
    return {names[id(p)]: whole(p.grad) for p in model.parameters() if p.grad is not None}


def compiled() -> bool:
    """Whether gradients are those of a model that is not compiled."""
    warnings.simplefilter("ignore")  # the compiler's own
    expected = gradients(made(Frozen, POLICY).eval())
    model = torch.compile(made(Frozen, POLICY).eval(), backend="eager")
    return _are_close(gradients(model), expected)


def test_parts_in_a_compiled_model_train_as_without_a_compiler(ranks: StartRanks) -> None:
    assert ranks(2).run(compiled) == [True] * 2


def verified() -> tuple[bool, int]:
    """Whether gradients are as without checks of first calls; the modules not checked yet."""
    torch.manual_seed(1)
    model = Model(Frozen)
    rotate_all(model, mesh=make_mesh("cpu"), policy=POLICY, find_blocks=False, verify=True)
    same = _are_close(gradients(model), gradients(made(Frozen, POLICY)))
    left = [getattr(each, "unchecked_modes", ()) for each in model.modules()]
    return same, sum(True in each for each in left)


def _are_close(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert grads.keys() == expected.keys()
    return all(torch.allclose(grads[name], expected[name]) for name in expected)


def test_checks_of_first_calls_are_no_calls_of_the_part(ranks: StartRanks) -> None:
    assert ranks(2).run(verified) == [(True, 0)] * 2
