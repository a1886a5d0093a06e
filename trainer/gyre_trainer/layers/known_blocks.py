"""The blocks that rotate as one: a table by shape of module, and the digests of trained code.

A row names the layers of a kind of module, and the numbers that its forward reads. It applies where
a module has these layers and `trained_code.json` has the digest of its code: the tests of families
write it there after they have trained the block and compared it with one process. Any other module
rotates layer by layer, which is exact whatever its code does.

Also here:

* The kinds of modules whose way to rotate is known.

A digest of the code that computes a module: its forward, and all that the forward calls.

Comments, annotations, docstrings, decorators and texts are no part of it, and neither are names of
classes. So modules of many families have one digest, and it stays through versions of a library
that change nothing but these.
"""

import ast
import inspect
import json
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from itertools import chain, product
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.attention import Attention, AttentionRule, rotate_attention
from gyre_trainer.layers.experts import Experts, ExpertsRule, MoE
from gyre_trainer.layers.linear import (
    EmbeddingRule,
    LinearRule,
    count_of,
    features_of,
    is_table,
    is_transposed_linear,
    rotate_linear,
)
from gyre_trainer.layers.mlp import MLP, GatedMLP, MLPRule
from gyre_trainer.rotation.rotated_module import (
    EXPERT_PARALLEL,
    RotationTarget,
    drop_rates,
    experts_function,
    kernels_of,
    num_hooks_inside,
    own_class,
    sets_forward,
    wrap,
)
from gyre_trainer.rotation.rule import Rule
from gyre_trainer.torch_internals import child_of, parameters_of
from gyre_trainer.whole.replicated import ReadRule, shard_own

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
# Functions of one entry each, so that slices of a width compute with them as the whole width does.
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Identity),
    *(nn.ELU, nn.LeakyReLU, nn.Hardtanh, nn.Hardswish, nn.Softplus, nn.Softsign),
)
_ELEMENTWISE_FUNCTIONS = frozenset(
    (F.relu, F.gelu, F.silu, F.tanh, F.sigmoid, F.mish, torch.relu, torch.tanh, torch.sigmoid)
)


_Names = tuple[str, ...]


class UnknownCode(Exception):
    """A module runs code that cannot be read; the message names it."""


def digest_of(module: nn.Module) -> str:
    """The digest of a module's code, and of that of the modules inside.

    Linear layers, dropouts and functions of one entry each count by their kind alone.

    Raises:
        UnknownCode: a forward is set on an instance, or has no source, or closes over variables.
    """
    text = "\n".join(_code_of(module))
    return blake2b(text.encode(), digest_size=8).hexdigest()


def is_elementwise(value: Any) -> bool:
    """Whether a module or a function computes each entry of its input alone."""
    if not isinstance(value, nn.Module):
        return value in _ELEMENTWISE_FUNCTIONS
    cls = own_class(value)
    is_of_library = cls.__module__ == "transformers.activations" and not parameters_of(value)
    return cls in _ELEMENTWISE or is_of_library


def _code_of(module: nn.Module) -> Iterator[str]:
    if sets_forward(module):
        raise UnknownCode(f"{own_class(module).__name__} has a forward set on the instance")
    cls = own_class(module)
    if cls.__module__.startswith("torch.nn."):
        yield f"{cls.__module__}.{cls.__qualname__}"
    else:
        kernel = experts_function(module)
        forward = _unwrapped(kernel, "its kernel") if kernel else _function(cls, "forward")
        yield from _function_code(forward, cls, set())
        yield from _attributes(module)
    for name, child in module.named_children():
        yield f"{name}:"
        if sets_forward(child):
            raise UnknownCode(f"{name} has a forward set on the instance")
        yield from (_kind(child),) if _kind(child) else _code_of(child)


def _kind(module: nn.Module) -> str:
    """The kind of a module that computes in a known way; empty for any other."""
    cls = own_class(module)
    if cls is nn.Linear or is_transposed_linear(module):
        return "linear"
    if cls is nn.Dropout or cls is nn.Identity:
        return "dropout"
    return "function of each entry" if is_elementwise(module) else ""


def _attributes(module: nn.Module) -> Iterator[str]:
    """Functions among a module's attributes, which a configuration may choose."""
    for name, value in vars(module).items():
        if callable(value) and not isinstance(value, type | nn.Module):
            kind = "function of each entry" if is_elementwise(value) else _name(value)
            yield f"{name} = {kind}"


def _function(cls: type, name: str) -> FunctionType:
    """The function of a class, as `_unwrapped` gives it."""
    found = inspect.getattr_static(cls, name, None)
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    return _unwrapped(found, f"{cls.__name__}.{name}")


def _function_code(function: FunctionType, cls: type | None, seen: set[Any]) -> Iterator[str]:
    """The code of a function, and of all functions that it names; ``cls`` is that of its `self`."""
    if function in seen:
        return
    seen.add(function)
    for name in function.__code__.co_freevars:
        if name != "__class__" or cls is None:
            raise UnknownCode(f"{function.__qualname__} closes over {name}")
    code, names, own, above = _parsed(function)
    yield code
    for name in above:
        yield f"super().{name}:"
        yield from _parent_code(function, name, cls, seen)
    for name in names:
        if name in function.__globals__:
            yield from _global_code(name, function.__globals__[name], seen)
    if cls is not None:
        for name in own:
            yield from _method_code(name, cls, seen)


def _global_code(name: str, value: Any, seen: set[Any]) -> Iterator[str]:
    """The code of a function that another one names, or what else the name stands for."""
    if isinstance(value, FunctionType) and not _is_of(value.__module__, ("torch",)):
        yield f"{name}:"
        yield from _function_code(_unwrapped(value, name), None, seen)
    else:
        yield f"{name} = {_name(value)}"


def _method_code(name: str, cls: type, seen: set[Any]) -> Iterator[str]:
    """The code of a method that `self` is asked for; nothing for those of every module."""
    value = inspect.getattr_static(cls, name, None)
    if value is None or hasattr(nn.Module, name):
        return
    if isinstance(value, FunctionType | property | classmethod | staticmethod):
        yield f"self.{name}:"
        yield from _function_code(_function(cls, name), cls, seen)
    else:
        yield f"self.{name} = {_name(value)}"


def _unwrapped(function: Any, name: str) -> FunctionType:
    """A function without the decorators of its library.

    Raises:
        UnknownCode: it is none, or decorated by other code.
    """
    while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        # `functools.wraps` copies the name of the module, but not the globals
        if not _is_of(function.__globals__["__name__"], ("transformers", "torch")):
            raise UnknownCode(f"{name} is wrapped")
        function = function.__wrapped__
    if not isinstance(function, FunctionType):
        raise UnknownCode(f"{name} is no function of Python")
    return function


def _parent_code(
    function: FunctionType, name: str, cls: type | None, seen: set[Any]
) -> Iterator[str]:
    """The code of the method that `super()` means in a function of ``cls``."""
    place = function.__code__.co_freevars.index("__class__")
    owner = function.__closure__[place].cell_contents if function.__closure__ else None
    mro = cls.__mro__ if cls is not None else ()
    above = mro[mro.index(owner) + 1 :] if owner in mro else ()
    parent = next((each for each in above if name in vars(each)), None)
    if parent is None:
        raise UnknownCode(f"{function.__qualname__} calls super().{name}")
    if parent.__module__.startswith("torch.nn."):
        yield f"{parent.__module__}.{parent.__qualname__}"
    else:
        yield from _function_code(_function(parent, name), cls, seen)


def _is_of(name: str | None, packages: tuple[str, ...]) -> bool:
    return (name or "").partition(".")[0] in packages


def _name(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type):
        return value.__qualname__
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return type(value).__qualname__


@cache
def _parsed(function: FunctionType) -> tuple[str, _Names, _Names, _Names]:
    """The normal form of a function's code, and names in it.

    Returns:
        The form; names that it reads, attributes of `self`, and those of `super()`.
    """
    try:
        source = textwrap.dedent(inspect.getsource(function))
        (tree,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise UnknownCode(f"{function.__qualname__} has no source") from error
    if not isinstance(tree, ast.FunctionDef):
        raise UnknownCode(f"{function.__qualname__} is no plain function")
    plain = _Plain().visit(tree)
    plain.name = "function"
    ast.fix_missing_locations(plain)
    first = plain.args.args[0].arg if plain.args.args else ""
    names = {each.id for each in ast.walk(plain) if isinstance(each, ast.Name)}
    attributes = [each for each in ast.walk(plain) if isinstance(each, ast.Attribute)]
    own = {each.attr for each in attributes if _is_named(each.value, first)}
    above = {
        each.attr
        for each in attributes
        if isinstance(each.value, ast.Call) and _is_named(each.value.func, "super")
    }
    return ast.unparse(plain), tuple(sorted(names)), tuple(sorted(own)), tuple(sorted(above))


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


class _Plain(ast.NodeTransformer):
    """Leaves out what computes nothing: annotations, docstrings, decorators, texts of errors."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list, node.returns = [], None
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        return self.generic_visit(ast.Assign(targets=[node.target], value=node.value))

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.Raise(exc=None, cause=None)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("text")


_LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Modules that a forward does not call.
_NOT_CALLED = {"__init__", "__repr__", "__setstate__", "extra_repr", "reset_parameters"}
_KINDS = (*_LAYERS, nn.MultiheadAttention, Attention, MLP, GatedMLP, Experts, MoE)


def rotate_known(module: nn.Module, target: RotationTarget) -> bool:
    """Rotate the module in the way of its kind, and return whether its kind is known.

    A module of an unknown kind is left as it is. A subclass with another forward is not of its
    parent's kind, and neither is a layer whose weight is computed from others.
    """
    if is_transposed_linear(module):
        shard_own(module, ReadRule(module.get_parameter("weight").numel()), target)
        return True
    kind = next((kind for kind in _KINDS if isinstance(module, kind)), None)
    if kind is None or not has_code_of(module, kind) or computes_weights(module):
        return False
    is_block = kind not in (*_LAYERS, nn.MultiheadAttention)
    if is_block and (num_hooks_inside(module) or any(map(sets_forward, module.modules()))):
        return False  # a hook or a forward of other code would see slices
    match module:
        case nn.Linear():
            rotate_linear(module, target)
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            shard_own(module, ReadRule(module.weight.numel()), target)
        case Attention():
            rotate_attention(module, target)
        case nn.MultiheadAttention():
            matrices = [each.numel() for each in module.parameters() if each.ndim > 1]
            shard_own(module, ReadRule(min(matrices), ("out_proj.weight",)), target)
        case MoE():
            wrap(module.experts, ExpertsRule(), target)  # the router stays whole
        case _:
            wrap(module, _rule_of(module), target)
    return True


def leave_fused_inference(model: nn.Module) -> None:
    """Switch torch's fused inference off in encoders with layers that rotate.

    It would read whole parameters, and pass nested tensors, without padding, from layer to layer.
    """
    for module in model.modules():
        if any(isinstance(each, DTensor) for each in module.parameters()):
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False


def has_code_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module runs the code of a class: no subclass, nor the instance, overrides it."""
    cls = own_class(module)
    if sets_forward(module) or cls.forward is not kind.forward:  # type: ignore[attr-defined]
        return False
    named = {
        name
        for each in kind.__mro__[: kind.__mro__.index(nn.Module)]
        for name, value in vars(each).items()
        if callable(value) or isinstance(value, property)
    } - _NOT_CALLED
    subclasses = cls.__mro__[: cls.__mro__.index(kind)]
    return not any(name in vars(each) for each in subclasses for name in named)


def computes_weights(module: nn.Module) -> bool:
    """Whether the weight of a layer is computed from others: by a parametrization, or by a hook.

    Such a hook is that of `nn.utils.weight_norm` or `nn.utils.spectral_norm`.
    """
    return is_parametrized(module) or (
        isinstance(module, _LAYERS) and "weight" not in parameters_of(module)
    )


def is_of_known_class(module: nn.Module) -> bool:
    """Whether the module's class, or one that it derives from, is among the known kinds."""
    return isinstance(module, _KINDS)


def _rule_of(module: nn.Module) -> Rule:
    match module:
        case nn.Embedding():
            return EmbeddingRule(module.num_embeddings, module.padding_idx)
        case GatedMLP():
            return MLPRule(ups=("gate", "up"))
        case MLP():
            return MLPRule()
        case _:
            return ExpertsRule()


BlockRule = AttentionRule | MLPRule

_KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "num_heads", "n_heads")


# Arguments that may have a tensor of all heads in dim 1.
_BY_HEADS = (
    *("head_mask", "layer_head_mask", "attention_mask", "mask"),
    *("position_bias", "relative_position_bias"),
)


def _attends(inputs: str, output: str, counts: str = "") -> AttentionRule:
    """A row of attention; the number of heads is that of the module, so it has none here."""
    return AttentionRule(
        0,
        tuple(inputs.split()),
        output,
        counts=(*counts.split(), "num_key_value_heads"),
        by_heads=_BY_HEADS,
        tables=("relative_attention_bias",),
    )


# Places of both layers in an `nn.Sequential`, with dropout between them, and with a norm first.
_SEQUENCES = ("0", "2"), ("0", "3"), ("1", "3"), ("1", "4")
_MLPS = (
    MLPRule(ups=("gate_proj", "up_proj"), down="down_proj"),
    MLPRule(ups=("up_proj",), down="down_proj"),
    MLPRule(ups=("w1", "w3"), down="w2"),
    MLPRule(ups=("wi_0", "wi_1"), down="wo"),
    MLPRule(ups=("wi",), down="wo"),
    MLPRule(ups=("fc1",), down="fc2"),
    MLPRule(ups=("c_fc",), down="c_proj"),
    MLPRule(ups=("fc_in",), down="fc_out"),
    MLPRule(ups=("dense_h_to_4h",), down="dense_4h_to_h"),
    *(MLPRule(ups=(up,), down=down) for up, down in _SEQUENCES),
)
_ATTENTIONS = (
    _attends("q_proj k_proj v_proj", "o_proj", "num_heads hidden_size"),
    _attends("q_proj k_proj v_proj", "out_proj", "num_heads embed_dim num_attention_heads"),
    _attends("q_proj k_proj v_proj", "dense"),
    _attends("qkv_proj", "out_proj"),
    _attends("query_key_value", "dense", "num_heads hidden_size"),
    _attends("q k v", "o", "n_heads inner_dim"),
    _attends("query key value", "output", "n_heads inner_dim"),
    _attends("q_lin k_lin v_lin", "out_lin", "n_heads dim"),
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
# The arguments of a kernel of transformers, which is called in place of a forward.
_BY_KERNEL: dict[str, Any] = {
    "chosen": "top_k_index",
    "scores": None,
    "arguments": ("hidden_states", "top_k_index", "top_k_weights"),
    "count": "num_experts",
    "gets_rows": True,
}


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
        experts_alone: whether stacked experts alone rotate as one, and no module with layers.
        reasons: why a module that has the layers of a row rotates layer by layer.
    """

    model: nn.Module
    num_slices: int
    experts_alone: bool = False
    reasons: dict[nn.Module, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._num_places = _num_places(self.model)

    def rule_of(self, module: nn.Module) -> Rule | None:
        """The rule by which a module rotates as one; None where it rotates layer by layer.

        Raises:
            RotationError: a plan of transformers has cut its experts among the ranks already.
        """
        if getattr(module, EXPERT_PARALLEL, False):
            raise RotationError(
                f"{own_class(module).__name__} is expert-parallel already: each rank has other "
                "experts. Load the model without a tp_plan; rotate_all cuts it"
            )
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
        if digest_of(module) not in trained_digests():
            kernel = kernels_of(module).get("experts kernel")
            code = (
                f"the code of its experts kernel {kernel}"
                if experts_function(module)
                else "its code"
            )
            raise UnknownCode(f"{code} is not among those that Gyre has trained")
        self._require_free(row, module)
        rule = _of_module(row, module)
        rule.cuts(module, self.num_slices)
        return rule

    def _require_free(self, row: Rule, module: nn.Module) -> None:
        if num_hooks_inside(module):
            raise RotationError("a hook is registered on a layer inside")
        for name, rate in drop_rates(module).items():
            if rate > 0:
                raise RotationError(f"it drops out ({name}={rate})")
        is_experts = isinstance(row, ExpertsRule)
        name = "experts kernel" if is_experts else "attention kernel"
        kernel = kernels_of(module).get(name, "eager")
        is_known = is_experts and experts_function(module)  # the digest has its code
        if kernel not in (("eager",) if is_experts else _KERNELS) and not is_known:
            raise RotationError(f"its {name} is {kernel}")
        places = {self._num_places[id(each)] for each in module.parameters()}
        if row.linear_in and len(places) > 1:
            raise RotationError("some of its parameters are tied, others not")


def _rows(module: nn.Module) -> Iterator[Rule]:
    if isinstance(module, nn.Linear) and _has_own_forward(module, nn.Linear):
        if parameters_of(module).keys() == {"weight", "bias"}:
            yield LinearRule()
    elif isinstance(module, nn.Embedding) and _has_own_forward(module, nn.Embedding):
        yield EmbeddingRule(module.num_embeddings, module.padding_idx)
    elif any(each is not None for each in parameters_of(module).values()):
        own = set(parameters_of(module))
        yield from (row for row in _EXPERTS if own == set(row.weights))
    children = dict(module.named_children())
    blocks: tuple[BlockRule, ...] = (*_MLPS, *_ATTENTIONS)
    for row in blocks:
        names = (*row.ups, row.down) if isinstance(row, MLPRule) else (*row.inputs, row.output)
        layers = [children.get(name) for name in names]
        if not all(each is not None and _is_projection(each) for each in layers):
            continue
        matrices = sum(each.ndim > 1 for each in module.parameters())
        if isinstance(row, AttentionRule) or matrices <= len(layers):  # a layer has more inside
            yield row


def _has_own_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    return own_class(module).forward is not kind.forward  # type: ignore[attr-defined]


def _is_projection(module: nn.Module) -> bool:
    if parameters_of(module).get("weight") is None:  # it is computed from others
        return False
    return isinstance(module, nn.Linear)


def _of_module(row: Rule, module: nn.Module) -> Rule:
    if isinstance(row, ExpertsRule) and experts_function(module):
        return replace(row, **_BY_KERNEL)
    if not isinstance(row, AttentionRule):
        return row
    tables = [name for name in row.tables if is_table(child_of(module, name) or nn.Module())]
    return replace(
        row,
        num_kv_heads=_num_kv_heads(row, module),
        counts=tuple(name for name in row.counts if count_of(module, name) is not None),
        tables=tuple(tables),
    )


def _num_kv_heads(row: AttentionRule, module: nn.Module) -> int:
    """The key/value heads that a module or its configuration has.

    Raises:
        RotationError: neither says how many there are.
    """
    owners = module, getattr(module, "config", None)
    widths = [features_of(module.get_submodule(name))[1] for name in row.inputs]
    inside = features_of(module.get_submodule(row.inputs[0]))[0]
    # as many heads of keys as of queries, whatever else a configuration has
    is_plain = widths == [3 * inside] or (len(widths) == 3 and len(set(widths)) == 1)
    names = _HEADS[2:] if is_plain else _HEADS
    found = (getattr(owner, name, None) for name, owner in product(names, owners))
    first = next((each for each in found if type(each) is int and each > 0), None)
    if first is None:
        raise RotationError("nothing says how many heads it has")
    return first


def _num_places(model: nn.Module) -> Counter[int]:
    """How many modules have each parameter, and each module with parameters, by its id."""
    found: Counter[int] = Counter()
    for module in model.modules():
        modules = {
            id(each) for each in module.children() if next(each.parameters(), None) is not None
        }
        found.update(modules | {id(each) for each in parameters_of(module).values()})
    return found


def suggested_rule(module: nn.Module) -> str:
    """A rule for a module of unknown code, as it is typed; empty where its layers say none."""
    rows = (row for row in _rows(module) if isinstance(row, BlockRule))
    row: BlockRule | None = next(rows, None) or _mlp_by_shape(module)
    if row is None:
        return ""
    try:
        rule = _of_module(row, module)
    except RotationError:
        return ""
    names = [each.name for each in fields(row) if getattr(rule, each.name) != each.default]
    shown = [name for name in names if name != "by_heads"]
    arguments = ", ".join(f"{name}={getattr(rule, name)!r}" for name in shown)
    return f"{type(rule).__name__}({arguments})"


def _mlp_by_shape(module: nn.Module) -> MLPRule | None:
    """The MLP that a module may be: two or three linear layers, one leading back."""
    layers = {
        name: features_of(each) for name, each in module.named_children() if _is_projection(each)
    }
    for down, (hidden, dim) in reversed(layers.items()) if len(layers) in (2, 3) else ():
        ups = {name: sizes for name, sizes in layers.items() if name != down}
        if hidden != dim and all(sizes == (dim, hidden) for sizes in ups.values()):
            return MLPRule(ups=tuple(ups), down=down)
    return None
