"""A ring pass as one operator of a compiled graph.

[Note: Ring passes in one graph]

The compiler must not look into a ring pass: hops run in threads, and a graph of them would differ
from rank to rank. So a graph has two operators of torch's library, `gyre::ring_pass` and
`gyre::ring_pass_backward`, which the compiler calls and cannot look into. Their effects are marked
as ordered, so a compiler keeps the order in which the model calls its modules, and it is the same
on every rank. When an operator runs, it runs the same ring pass that the module runs without a
compiler.

What a ring pass needs beside tensors is its *call site*: the arguments that are no tensors,
autocast, and which tensors take gradients. It is noted when the graph is traced, and the graph
names it by two numbers: that of the module, and its index among the module's call sites. These live
as long as the module. A call site also has the form of the output that the tracer has assumed; an
operator whose output has another form is an error.

The ring pass of a call waits for its backward under a third number, in a tensor that the graph
keeps until then. When that tensor is gone, so is the ring pass.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gyre_trainer.comm.spans import path_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.caches.shared_cache import is_cache
from gyre_trainer.rotation.call import Call, cast
from gyre_trainer.rotation.form import Missing, Passed
from gyre_trainer.rotation.graph_sites import (
    FlatForm,
    Shapes,
    Site,
    fits,
    numbers,
    shapes_of,
    sites_at,
)
from gyre_trainer.rotation.ring_pass import RingPass
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.rotation.rule import swapped
from gyre_trainer.shards.local_shards import local_of
from gyre_trainer.shards.sharded_parameters import has_sole_storage

# What a custom operator excludes and a ring pass needs: it records the graphs of its slices.
_AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.AutogradCPU,
    torch._C.DispatchKey.AutogradCUDA,
    torch._C.DispatchKey.ADInplaceOrView,
)
_PASSES: dict[int, RingPass] = {}
_CHECKPOINT = "torch.utils.checkpoint"


def traced_pass(number: int, parameters: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
    """The output of a rotated module in a graph that is traced.

    Args:
        number: that of its `Sites`.
        parameters: the module's sharded parameters in the order of the cuts, and the replicated
            ones in that of their names.
        args: the module's arguments, with `NOTHING` for None, which such graphs cannot pass on.
        kwargs: its arguments by name, likewise.

    Raises:
        RotationError: the module's rule was not checked yet, or it is called with a cache or inside
            of a checkpoint, or returns something else than tensors and None.
    """
    sites = sites_at(number)
    rotation = sites.module.rotation
    arguments, given = FlatForm.of((args, kwargs))
    _require_can_be_traced(sites.module, arguments)
    tensors = [*map(local_of, parameters), *given]
    kind, recorded = rotation.sharded.flat.device.type, torch.is_grad_enabled()
    site = Site(
        len(parameters),
        arguments,
        shapes_of(tensors),
        [recorded and tensor.requires_grad for tensor in tensors],
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
    )
    index = sites.add(site)
    outputs = torch.ops.gyre.ring_pass(tensors, number, index)[:-1]
    output = sites[index].output
    assert output is not None
    return output[0].filled_in_graph(outputs, given)


def _require_can_be_traced(module: RotatedModule, arguments: FlatForm) -> None:
    name = module.rotation.name
    if module.training in module.unchecked_modes:
        raise RotationError(
            f"the rule of a {name} was not checked, because no call before has reached it in "
            f"{'training' if module.training else 'evaluation'}; call the model once so that it "
            "reaches all modules, before compile_whole"
        )
    cache = next((leaf for leaf in arguments.leaves if is_cache(leaf)), None)
    if cache is not None:
        raise RotationError(
            f"a {name} is called with a {type(cache).__name__}, to which a graph cannot add keys "
            "and values; call the model with use_cache=False"
        )
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat) for leaf in arguments.leaves):
        raise RotationError(
            f"a {name} is called with a number that depends on the values of tensors, which no "
            "call in a graph can keep"
        )
    if any(type(mode).__module__ == _CHECKPOINT for mode in _get_current_dispatch_mode_stack()):
        raise RotationError(
            f"{path_of(module.rotation.module)} is called inside of {_CHECKPOINT}, but no graph "
            "can make its ring pass once more in backward; take RotationPolicy(recompute=True) in "
            "place of the checkpoint"
        )


@contextmanager
def _recording(site: Site, kind: str) -> Iterator[None]:
    """A context inside of an operator in which the graphs of slices can be recorded."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    enabled, dtype = site.autocast
    with (
        torch._C._ForceDispatchKeyGuard(included, excluded),
        torch.autocast(kind, dtype, enabled, cache_enabled=False),
    ):
        yield


def _owned(tensors: list[Tensor]) -> list[Tensor]:
    """Contiguous tensors whose memory nothing else uses, as an operator must return; empties it."""
    tensors.reverse()
    owned = []
    while tensors:
        tensor = tensors.pop().contiguous()
        owned.append(tensor if has_sole_storage(tensor) else tensor.clone())
    return owned


@torch.library.custom_op("gyre::ring_pass", mutates_args=())
def _ring_pass(tensors: list[Tensor], number: int, index: int) -> list[Tensor]:
    """The module's outputs, and a number for backward."""
    site, module = sites_at(number)[index], sites_at(number).module
    # A compiler may write into a tensor's memory after the last operator that it was given to, and
    # backward still needs its values. The inductor does: without copies gradients are wrong.
    arguments = [
        (tensor.clone() if site.recorded else tensor.detach()).requires_grad_(takes_grad)
        for tensor, takes_grad in zip(
            tensors[site.num_parameters :], site.takes_grad[site.num_parameters :], strict=True
        )
    ]
    args, kwargs = site.arguments.filled(arguments)
    module.add_dropout_masks(kwargs)
    device = module.rotation.sharded.flat.device
    with _recording(site, device.type), torch.set_grad_enabled(site.recorded):
        call = Call(module.rotation, args, kwargs)
        given = call.given
        if call.recomputed:
            call.find_recomputations()
        ring_pass = RingPass(module.rotation, call)
        with torch.no_grad():
            outputs = list(ring_pass.forward(list(call.tensors)))
    _require_form(site, module.rotation, call.rebuild_output(outputs, given), given)
    token = torch.tensor(next(numbers))
    if site.recorded:
        _PASSES[int(token)] = ring_pass
        weakref.finalize(token.untyped_storage(), _PASSES.pop, int(token), None)
    return [*_owned(outputs), token]


def _require_form(site: Site, rotation: Rotation, output: Any, given: Sequence[Tensor]) -> None:
    form, tensors = FlatForm.of(output, given)
    noted = site.output
    if noted is None or form != noted[0] or not fits(shapes_of(tensors), noted[1]):
        raise RotationError(
            f"{rotation.name} returned another output than when its graph was compiled: "
            f"{_described(form, shapes_of(tensors))} instead of "
            f"{_described(*site.output) if site.output else 'nothing'}; after a change of a "
            "module's attributes call torch._dynamo.reset(), which lets all graphs be compiled "
            "again"
        )


def _described(form: FlatForm, shapes: Shapes) -> str:
    return str(form.filled(f"{dtype} {shape}" for shape, dtype in shapes))


@_ring_pass.register_fake
def _(tensors: list[Tensor], number: int, index: int) -> list[Tensor]:
    """Outputs of the shapes that the module's own forward gives on weights without memory."""
    site, rotation = sites_at(number)[index], sites_at(number).module.rotation
    parameters, given = tensors[: site.num_parameters], tensors[site.num_parameters :]
    like, dtype = parameters[0], rotation.policy.compute_dtype
    whole = {
        name: cast(like.new_empty(parameter.shape, dtype=parameter.dtype), dtype)
        for name, parameter in rotation.module.named_parameters(remove_duplicate=False)
    }
    arguments = [cast(tensor, dtype) for tensor in given]
    args, kwargs = site.arguments.filled(arguments)
    with swapped(rotation.module, whole):
        form, found = FlatForm.of(rotation.forward(*args, **kwargs), arguments)
    known = [leaf is Missing or leaf is None or isinstance(leaf, Passed) for leaf in form.leaves]
    other = form.leaves[known.index(False)] if not all(known) else None
    if other is not None or not found:
        raise RotationError(
            f"{rotation.name} returns a {type(other).__name__}; in a model that is compiled as one "
            "graph a rotated module must return tensors and None, in tuples, lists and dicts"
        )
    outer = rotation.outer_dtype(given)
    outputs = [like.new_empty(each.shape, dtype=outer) for each in found]
    site.output = form, shapes_of(outputs)
    return [*outputs, torch.empty((), dtype=torch.int64)]


@torch.library.custom_op("gyre::ring_pass_backward", mutates_args=())
def _ring_pass_backward(
    grads: list[Tensor], token: Tensor, sizes: list[int], number: int, index: int
) -> list[Tensor]:
    """The gradients of those tensors that take one; zeros where nothing reached them.

    ``sizes`` are those that were not known when the graph was traced.
    """
    site, rotation = sites_at(number)[index], sites_at(number).module.rotation
    ring_pass = _PASSES.pop(int(token), None)
    if ring_pass is None:
        raise RotationError(
            f"backward through {rotation.name} ran before; it can run once after each forward"
        )
    with _recording(site, rotation.sharded.flat.device.type), torch.no_grad():
        found = ring_pass.backward(grads)
        taken = [grad for grad, takes in zip(found, site.takes_grad, strict=True) if takes]
        return _owned(
            [
                grads[0].new_zeros(shape, dtype=dtype) if grad is None else local_of(grad)
                for grad, (shape, dtype) in zip(taken, site.known_shapes(sizes), strict=True)
            ]
        )


@_ring_pass_backward.register_fake
def _(
    grads: list[Tensor], token: Tensor, sizes: list[int], number: int, index: int
) -> list[Tensor]:
    shapes = sites_at(number)[index].known_shapes(sizes)
    return [grads[0].new_empty(shape, dtype=dtype) for shape, dtype in shapes]


def _keep(ctx: Any, inputs: tuple[list[Tensor], int, int], output: list[Tensor]) -> None:
    tensors, ctx.number, ctx.index = inputs
    ctx.sizes = sites_at(ctx.number)[ctx.index].unknown_sizes(tensors)
    ctx.save_for_backward(output[-1])


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None, None]:
    (token,) = ctx.saved_tensors
    number, index = ctx.number, ctx.index
    operator = torch.ops.gyre.ring_pass_backward
    found = iter(operator(grads[:-1], token, ctx.sizes, number, index))
    takes_grad = sites_at(number)[index].takes_grad
    return [next(found) if takes else None for takes in takes_grad], None, None


_ring_pass.register_autograd(_differentiate, setup_context=_keep)


@cache
def order_operators() -> None:
    """Mark the operators' effects as ordered, so that no compiler swaps two of them.

    Raises:
        RotationError: this torch is too old for such marks.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        raise RotationError(
            f"compile_whole needs torch 2.13 or later, and this is {torch.__version__}; "
            "torch.compile(model), whose graphs may break, works with older ones"
        )
    for operator in (_ring_pass, _ring_pass_backward):
        operator.register_effect(torch._library.effects.EffectType.ORDERED)
