"""The blocks that rotate as one: a table by shape of module, and the digests of trained code.

A row names the layers of a kind of module, and the numbers that its forward reads. It applies where
a module has these layers and `trained_code.json` has the digest of its code: the tests of families
write it there after they have trained the block and compared it with one process. Any other module
rotates layer by layer, which is exact whatever its code does.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from itertools import chain, product
from typing import Any

from torch import nn

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.embedding import OwnEmbeddingRule
from gyre_trainer.layers.experts.moe import ExpertsRule
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.layers.module_code import UnknownCode, digest_of
from gyre_trainer.layers.projections import count_of, features_of, is_table, is_transposed_linear
from gyre_trainer.rotation.guard import drop_rates, kernels_of, own_class, sets_forward
from gyre_trainer.rotation.rotated_module import num_hooks_inside
from gyre_trainer.rotation.rule import Rule

BlockRule = AttentionRule | MLPRule

_LISTS = nn.ModuleList, nn.ModuleDict, nn.Sequential
_KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_EXPERTS_KERNELS = ("eager",)  # no other one was trained
_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "num_heads", "n_heads")

# Arguments that may have a tensor of all heads in dim -3.
_BY_HEADS = (
    *("head_mask", "layer_head_mask", "attention_mask", "mask"),
    *("position_bias", "relative_position_bias"),
)
_BATCHED = ("attention_mask", "mask")


def _attends(
    inputs: str, output: str, counts: str = "", *, packed: bool = False, core: str = ""
) -> AttentionRule:
    """A row of attention; the number of heads is that of the module, so it has none here."""
    names = tuple(f"{core}.{name}".strip(".") for name in inputs.split())
    return AttentionRule(
        0,
        names,
        output,
        packed=packed,
        counts=tuple(counts.split()),
        kv_counts=("num_key_value_heads",),
        groups=("num_key_value_groups",),
        by_heads=_BY_HEADS,
        batched=_BATCHED,
        tables=("relative_attention_bias",),
        core=core,
    )


# Places of both layers in an `nn.Sequential`, with dropout between them, and with a norm first.
_SEQUENCES = ("0", "2"), ("0", "3"), ("1", "3"), ("1", "4")
_MLPS = (
    MLPRule(ups=("gate_proj", "up_proj"), down="down_proj"),
    MLPRule(ups=("gate_up_proj",), down="down_proj", num_packed=2),
    MLPRule(ups=("up_proj",), down="down_proj"),
    MLPRule(ups=("w1", "w3"), down="w2"),
    MLPRule(ups=("wi_0", "wi_1"), down="wo"),
    MLPRule(ups=("wi",), down="wo"),
    MLPRule(ups=("fc1",), down="fc2"),
    MLPRule(ups=("c_fc",), down="c_proj"),
    MLPRule(ups=("fc_in",), down="fc_out"),
    MLPRule(ups=("dense_h_to_4h",), down="dense_4h_to_h"),
    MLPRule(ups=("intermediate.dense",), down="output.dense", core="intermediate"),
    *(MLPRule(ups=(up,), down=down) for up, down in _SEQUENCES),
)
_ATTENTIONS = (
    _attends("q_proj k_proj v_proj", "o_proj", "num_heads hidden_size"),
    _attends("q_proj k_proj v_proj", "out_proj", "num_heads embed_dim num_attention_heads"),
    _attends("q_proj k_proj v_proj", "dense"),
    _attends("qkv_proj", "o_proj", "config.num_attention_heads", packed=True),
    _attends("qkv_proj", "out_proj"),
    _attends("c_attn", "c_proj", "split_size num_heads", packed=True),
    _attends("query_key_value", "dense", "num_heads hidden_size"),
    _attends("Wqkv", "out_proj", "n_heads hidden_size", packed=True),
    _attends("q k v", "o", "n_heads inner_dim"),
    _attends("query key value", "output", "n_heads inner_dim"),
    _attends("q_lin k_lin v_lin", "out_lin", "n_heads dim"),
    _attends("query key value", "output.dense", "num_attention_heads all_head_size", core="self"),
    _attends(
        "query key value", "output.dense", "num_attention_heads all_head_size", core="attention"
    ),
)
_EXPERTS = (
    ExpertsRule(
        weights=("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
        chosen="router_indices",
        scores="routing_weights",
        last=("down_proj", "down_proj_bias"),
        arguments=("hidden_states", "router_indices", "routing_weights"),
    ),
    ExpertsRule(
        weights=("gate_up_proj", "down_proj"),
        chosen="top_k_index",
        last=("down_proj",),
        arguments=("hidden_states", "top_k_index", "top_k_weights"),
        count="num_experts",
    ),
)


@cache
def trained_digests() -> frozenset[str]:
    """The digests of all code that was trained, of every version of a library."""
    text = files("gyre_trainer.layers").joinpath("trained_code.json").read_text("utf-8")
    return frozenset(chain.from_iterable(json.loads(text).values()))


def is_trained(module: nn.Module) -> bool:
    """Whether a module runs code that was trained."""
    try:
        return digest_of(module) in trained_digests()
    except UnknownCode:
        return False


@dataclass
class KnownBlocks:
    """Which modules of a model rotate as one, and why others do not.

    Attributes:
        num_slices: the size of the ring.
        regrouped: whether rules count where rows travel once more before each pass: those with
            packed parameters, and those where slices share key/value heads. Where nothing is
            recomputed they cost more than they spare.
        drops_out: whether modules that drop out count.
        experts_alone: whether stacked experts alone rotate as one, and no module with layers.
        reasons: why a module that has the layers of a row rotates layer by layer.
    """

    model: nn.Module
    num_slices: int
    regrouped: bool = False
    drops_out: bool = True
    experts_alone: bool = False
    reasons: dict[nn.Module, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        modules = list(self.model.modules())
        self._shares_caches = not any(map(_has_cache_of_its_own, modules))
        lists = (each for each in modules if isinstance(each, _LISTS))
        self._repeated = {id(each) for one in lists for each in one.modules() if each is not one}
        self._num_places = _num_places(self.model)

    def rule_of(self, module: nn.Module) -> Rule | None:
        """The rule by which a module rotates as one; None where it rotates layer by layer."""
        for row in _rows(module):
            if self.experts_alone and isinstance(row, BlockRule):
                return None
            try:
                return self._applied(row, module)
            except (RotationError, UnknownCode) as error:
                self.reasons[module] = str(error)
        is_of_torch = own_class(module).__module__.startswith("torch.")
        is_block = not is_of_torch and sum(map(_is_projection, module.children())) > 1
        if is_block and not self.experts_alone and module not in self.reasons:
            self.reasons[module] = "no rule names its code"
        return None

    def _applied(self, row: Rule, module: nn.Module) -> Rule:
        """A row as the rule of a module.

        Raises:
            RotationError: it does not apply; the message tells why.
            UnknownCode: likewise.
        """
        core = module.get_submodule(row.core)
        digest = digest_of(core)
        if digest not in trained_digests():
            raise UnknownCode("its code is not among those that Gyre has trained")
        self._require_free(row, module, core)
        rule = _of_module(row, core)
        if rule.drops_out and not self.drops_out:
            raise RotationError("it drops out, and masks are to be equal at every number of ranks")
        if rule.caches_heads and not self._shares_caches:
            raise RotationError("its model has a cache that slices cannot share")
        if not self.regrouped and _is_regrouped(rule, self.num_slices):
            raise RotationError("its packed layers, or heads, pay with recompute alone")
        rule.cuts(module, self.num_slices)
        return rule

    def _require_free(self, row: Rule, module: nn.Module, core: nn.Module) -> None:
        if num_hooks_inside(core):
            raise RotationError("a hook is registered on a layer inside")
        is_experts = isinstance(row, ExpertsRule)
        name = "experts kernel" if is_experts else "attention kernel"
        kernel = kernels_of(core).get(name, "eager")
        if kernel not in (_EXPERTS_KERNELS if is_experts else _KERNELS):
            raise RotationError(f"its {name} is {kernel}")
        if row.core:
            last = module.get_submodule(row.linear_in[0].rpartition(".")[0])
            hooks = (core._forward_hooks, core._backward_hooks, core._backward_pre_hooks)
            of_last = (last._forward_pre_hooks, last._backward_hooks, last._backward_pre_hooks)
            if any(hooks) or any(of_last) or sets_forward(last):
                raise RotationError("a hook is registered between its last two layers")
            if id(module) not in self._repeated or self._shares_parts(module):
                raise RotationError("its parts may be called by other modules, too")
        if row.linear_in and self._is_tied_in_part(module):
            raise RotationError("some of its parameters are tied, others not")

    def _is_tied_in_part(self, module: nn.Module) -> bool:
        return len({self._num_places[id(each)] for each in module.parameters()}) > 1

    def _shares_parts(self, module: nn.Module) -> bool:
        inside = (each for each in module.modules() if each is not module)
        return any(self._num_places[id(part)] > 1 for part in chain(inside, module.parameters()))


def _rows(module: nn.Module) -> Iterator[Rule]:
    """The rows whose layers a module has."""
    if isinstance(module, nn.Linear) and _has_own_forward(module, nn.Linear):
        if module._parameters.keys() == {"weight", "bias"}:
            yield LinearRule()
    elif isinstance(module, nn.Embedding) and _has_own_forward(module, nn.Embedding):
        yield OwnEmbeddingRule(module.num_embeddings, module.padding_idx)
    elif any(each is not None for each in module._parameters.values()):
        own = set(module._parameters)
        yield from (row for row in _EXPERTS if own == set(row.weights))
    blocks: tuple[BlockRule, ...] = (*_MLPS, *_ATTENTIONS)
    for row in blocks:
        if row.core not in ("", *module._modules):
            continue
        names = (*row.ups, row.down) if isinstance(row, MLPRule) else (*row.inputs, row.output)
        layers = [_inside(module, name) for name in names]
        if not all(each is not None and _is_projection(each) for each in layers):
            continue
        core = module if not row.core else module.get_submodule(row.core)
        matrices = sum(each.ndim > 1 for each in core.parameters())
        if isinstance(row, AttentionRule) or matrices <= len(layers):  # a layer has more inside
            yield row


def _inside(module: nn.Module, path: str) -> nn.Module | None:
    found: Any = module
    for name in path.split("."):
        found = None if found is None else found._modules.get(name)
    return found if isinstance(found, nn.Module) else None


def _has_own_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    return own_class(module).forward is not kind.forward  # type: ignore[attr-defined]


def _is_projection(module: nn.Module) -> bool:
    if module._parameters.get("weight") is None:  # it is computed from others
        return False
    return isinstance(module, nn.Linear) or is_transposed_linear(module)


def _of_module(row: Rule, core: nn.Module) -> Rule:
    """A row with the numbers of a module."""
    drops = any(rate > 0 for rate in drop_rates(core).values()) or any(
        isinstance(each, nn.Dropout) and each.p > 0 for each in core.modules()
    )
    if isinstance(row, MLPRule):
        return replace(row, drops_out=drops)
    if not isinstance(row, AttentionRule):
        return row
    prefix = f"{row.core}." if row.core else ""
    tables = [name for name in row.tables if is_table(core._modules.get(name) or nn.Module())]
    return replace(
        row,
        num_kv_heads=_num_kv_heads(row, core),
        counts=_read(core, row.counts),
        kv_counts=_read(core, row.kv_counts),
        groups=_read(core, row.groups),
        tables=tuple(prefix + name for name in tables),
        drops_out=drops,
    )


def _read(core: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if count_of(core, name) is not None)


def _num_kv_heads(row: AttentionRule, core: nn.Module) -> int:
    """The key/value heads that a module or its configuration has.

    Raises:
        RotationError: neither says how many there are.
    """
    owners = core, getattr(core, "config", None)
    own = [name.removeprefix(f"{row.core}.") for name in row.inputs]
    widths = [features_of(core.get_submodule(name))[1] for name in own]
    inside = features_of(core.get_submodule(own[0]))[0]
    # as many heads of keys as of queries, whatever else a configuration has
    is_plain = widths == [3 * inside] or (len(widths) == 3 and len(set(widths)) == 1)
    names = _HEADS[2:] if is_plain else _HEADS
    found = (getattr(owner, name, None) for name, owner in product(names, owners))
    first = next((each for each in found if type(each) is int and each > 0), None)
    if first is None:
        raise RotationError("nothing says how many heads it has")
    return first


def _is_regrouped(rule: Rule, num_slices: int) -> bool:
    if isinstance(rule, MLPRule):
        return rule.num_packed > 1
    if isinstance(rule, AttentionRule):
        return rule.packed or rule.num_kv_heads % num_slices > 0
    return False


def _num_places(model: nn.Module) -> Counter[int]:
    """How many modules have each parameter, and each module with parameters, by its id."""
    found: Counter[int] = Counter()
    for module in model.modules():
        modules = {
            id(each) for each in module.children() if next(each.parameters(), None) is not None
        }
        found.update(modules | {id(each) for each in module._parameters.values()})
    return found


def _has_cache_of_its_own(module: Any) -> bool:
    """Whether it is a model of `transformers` whose cache slices cannot share.

    Such a cache also has states of another kind, as those of Mamba or of convolutions.
    """
    supports = getattr(module, "_supports_default_dynamic_cache", None)
    return supports is not None and not supports()


def suggested_rule(module: nn.Module) -> str:
    """A rule for a module of unknown code, as it is typed; empty where its layers say none."""
    rows = (row for row in _rows(module) if isinstance(row, BlockRule))
    row: BlockRule | None = next(rows, None) or _mlp_by_shape(module)
    if row is None:
        return ""
    try:
        rule = _of_module(row, module.get_submodule(row.core))
    except RotationError:
        return ""
    names = [each.name for each in fields(row) if getattr(rule, each.name) != each.default]
    shown = [name for name in names if name not in ("by_heads", "batched")]
    arguments = ", ".join(f"{name}={getattr(rule, name)!r}" for name in shown)
    return f"{type(rule).__name__}({arguments})"


def _mlp_by_shape(module: nn.Module) -> MLPRule | None:
    """The MLP that a module may be: two or three linear layers, one leading back."""
    layers = {
        name: features_of(each) for name, each in module.named_children() if _is_projection(each)
    }
    for down, (hidden, dim) in reversed(layers.items()) if len(layers) in (2, 3) else ():
        ups = {name: sizes for name, sizes in layers.items() if name != down}
        if all(sizes == (dim, hidden) for sizes in ups.values()):
            return MLPRule(ups=tuple(ups), down=down)
    return None
