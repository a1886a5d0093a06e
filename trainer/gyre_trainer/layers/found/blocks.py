"""Finds attention, MLPs and experts by their structure, and tries each finding before it is used.

A module with two or three linear layers may be an MLP, and one with four, or with two of which the
first makes queries, keys and values, an attention: the shapes of the layers say which could be the
last one and which one packs several, and a `config`, or the module's own attributes, how many
key/value heads there are. Nothing is concluded from names of classes. A small twin of the module
then shows whether its slices make its output, and which numbers a slice must read smaller.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, combinations, islice, product

import torch
from torch import nn

from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.found.embeddings import find_embedding_rule
from gyre_trainer.layers.found.experts import find_experts_rule
from gyre_trainer.layers.found.linears import find_linear_rule, is_projection
from gyre_trainer.layers.found.twin import BlockRule, Twin
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.layers.projections import features_of, is_table
from gyre_trainer.rotation.rotated_module import num_hooks_inside
from gyre_trainer.rotation.rule import Rule

# Subsets of the numbers that a forward reads. One has four of them or fewer, as a rule: 15 subsets,
# or 80 where each may be that of key/value heads or that of the query heads of one of these.
_MAX_TRIALS = 80
_HEAD_COUNTS = "num_key_value_heads", "num_kv_heads", "num_attention_heads", "num_heads", "n_heads"


def find_rule(
    module: nn.Module, num_slices: int, *, regrouped: bool = False, drops_out: bool = True
) -> Rule | None:
    """The rule by which a module rotates as a whole; None where none was found.

    A rule is found where the outputs of a small twin, of the same code, are those of its slices, in
    training and in evaluation. Random numbers are drawn later as if none had been drawn here.

    Args:
        module: it may be on `meta`.
        num_slices: the size of the ring.
        regrouped: whether rules count where rows travel once more before each pass: those with
            packed parameters, and those where slices share key/value heads. Where nothing is
            recomputed they cost more than they spare.
        drops_out: whether rules of modules that drop out count.
    """
    with trying():
        rules = rules_by_shape(module, num_slices, regrouped=regrouped)
        found = first_that_fits(module, rules, num_slices, drops_out=drops_out)
    return (
        found
        or find_experts_rule(module, num_slices)
        or find_embedding_rule(module, num_slices)
        or find_linear_rule(module, num_slices)
    )


@contextmanager
def trying() -> Iterator[None]:
    """A context for trials, whose random numbers are always the same and change no later ones."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)  # no other device has the fork
        yield


def rules_by_shape(module: nn.Module, num_slices: int, *, regrouped: bool) -> Iterator[BlockRule]:
    """The rules that the shapes of a module's layers allow; see `find_rule`."""
    if has_plain_layers(module):
        yield from _mlp_rules(module, regrouped)
        yield from _attention_rules(module, num_slices, regrouped=regrouped)


def first_that_fits(
    module: nn.Module,
    rules: Iterable[BlockRule],
    num_slices: int,
    *,
    drops_out: bool,
) -> BlockRule | None:
    """The first of ``rules`` by which the slices of a twin make its output, in `trying`.

    It names what the trial has found, such as numbers that the forward reads. With ``drops_out`` it
    may be that of a module that drops out.
    """
    for rule in rules:
        twin = _twin(module, replace(rule, drops_out=drops_out), num_slices)
        if twin is None:
            continue
        fitting = twin.fitting()
        if fitting is None and isinstance(twin.rule, AttentionRule):
            trials = (replace(twin, rule=each) for each in _counted(module, twin.rule, twin))
            fitting = next((found for each in trials if (found := each.fitting())), None)
        if fitting is not None:
            return fitting
    return None


def _twin(module: nn.Module, rule: BlockRule, num_slices: int) -> Twin | None:
    """A twin to try the rule on; None where the rule or the forward cannot be tried."""
    try:
        return Twin.of(module, rule, num_slices)
    except Exception:
        # A RotationError tells of dropout, or of heads that the ranks cannot share; anything else
        # comes from foreign code, called with arguments that it may not take.
        return None


def has_plain_layers(module: nn.Module) -> bool:
    """Whether there are linear layers directly inside, and all matrices are theirs or embeddings'.

    Parameters of its own may be tables with a column for each head. A hook on one of these layers
    would get what slices compute, so there must be none.
    """
    if not any(map(is_projection, module.children())):
        return False
    others = [child for child in module.children() if not (is_projection(child) or is_table(child))]
    inside = [parameter for child in others for parameter in child.parameters()]
    if len(_own_tables(module)) < len(module._parameters) or num_hooks_inside(module):
        return False
    return all(parameter.ndim <= 1 for parameter in inside)


def _features(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Input and output features of the linear layers directly inside."""
    layers = {name: child for name, child in module.named_children() if is_projection(child)}
    return {name: features_of(layer) for name, layer in layers.items()}


def _tables(module: nn.Module) -> dict[str, int]:
    """The columns of the embeddings directly inside, and of tables among its own parameters."""
    children = module.named_children()
    found = {name: child.embedding_dim for name, child in children if is_table(child)}
    return found | _own_tables(module)


def _own_tables(module: nn.Module) -> dict[str, int]:
    """The columns of its own parameters that have as many as it has heads."""
    counts = _head_counts(module) if module._parameters else []
    return {
        name: each.shape[1]
        for name, each in module._parameters.items()
        if each is not None and each.ndim == 2 and each.shape[1] in counts
    }


def _mlp_rules(module: nn.Module, packed: bool) -> Iterator[MLPRule]:
    layers = _features(module)
    if len(layers) not in (2, 3) or _tables(module):
        return
    for down, (hidden, dim) in layers.items():
        ups = {name: sizes for name, sizes in layers.items() if name != down}
        widths = {outputs for _, outputs in ups.values()}
        if any(inputs != dim for inputs, _ in ups.values()) or len(widths) != 1 or not hidden:
            continue
        num_packed, rest = divmod(widths.pop(), hidden)
        if not rest and (num_packed == 1 or (packed and num_packed)):
            yield MLPRule(ups=tuple(ups), down=down, num_packed=num_packed)


def _attention_rules(
    module: nn.Module, num_slices: int, *, regrouped: bool
) -> Iterator[AttentionRule]:
    layers, tables = _features(module), tuple(_tables(module))
    for num_kv_heads, (output, (heads, dim)) in product(
        _head_counts(module), reversed(layers.items())
    ):
        inputs = {name: sizes for name, sizes in layers.items() if name != output}
        widths = sorted(outputs for _, outputs in inputs.values())
        if any(size != dim for size, _ in inputs.values()) or not _are_heads(widths, heads):
            continue
        if widths[0] % num_kv_heads == 0 and (regrouped or num_kv_heads % num_slices == 0):
            rule = AttentionRule(num_kv_heads, tuple(inputs), output, tables=tables)
            yield rule
            if regrouped and len(widths) == 1:
                yield replace(rule, packed=True)


def _are_heads(widths: list[int], num_channels: int) -> bool:
    """Whether layers of these widths may make keys, values and queries of ``num_channels``.

    One layer may make them all: with the rows of each head together, or all queries first; the
    trial shows that.
    """
    match widths:
        case [packed]:
            return packed > num_channels
        case [keys, values, queries]:
            return keys == values and queries == num_channels
        case [_, _, _, *_]:  # others make keys and queries of positions
            return set(widths) == {num_channels}
    return False


def _head_counts(module: nn.Module) -> list[int]:
    """How many key/value heads there may be, the likeliest first."""
    owners = module, getattr(module, "config", None)
    found = (getattr(owner, name, None) for name, owner in product(_HEAD_COUNTS, owners))
    return list(dict.fromkeys(each for each in found if isinstance(each, int) and each > 0))


def _counted(module: nn.Module, rule: AttentionRule, twin: Twin) -> Iterator[AttentionRule]:
    """The rule with some of the numbers that the forward reads, few before many.

    They are those of heads, or of channels of all heads. Another number, such as the channels of
    one head, may be as large by chance, so all subsets are possible.
    """
    heads = rule.shared_heads(twin.layout.cuts, twin.layout.num_slices)
    divisor = twin.layout.num_slices
    if heads is None:
        sizes = [size for features in _features(module).values() for size in features]
        kinds = {"counts": {*sizes, *_head_counts(module)}}
    elif heads.group == 1:  # a query head and its key/value head are counted as one
        kinds, divisor = {"counts": {heads.num_heads, heads.kv_width}}, heads.num_heads
    else:
        divisor = heads.num_heads
        kinds = {
            "groups": {heads.group},
            "kv_counts": {heads.num_kv_heads, heads.kv_width},
            "counts": {heads.num_heads, heads.kv_width * heads.group},
        }
    changes = [
        (kind, name)
        for name, value in twin.numbers_read().items()
        for kind, values in kinds.items()
        if value in values and (kind != "counts" or value % divisor == 0)
    ]
    subsets = chain.from_iterable(
        combinations(changes, size) for size in range(1, len(changes) + 1)
    )
    distinct = (each for each in subsets if len({name for _, name in each}) == len(each))
    for chosen in islice(distinct, _MAX_TRIALS):
        named = {kind: tuple(name for of, name in chosen if of == kind) for kind in kinds}
        groups, kv_counts = named.get("groups", ()), named.get("kv_counts", ())
        yield replace(rule, counts=named["counts"], kv_counts=kv_counts, groups=groups)
