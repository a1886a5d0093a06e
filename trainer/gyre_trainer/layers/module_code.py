"""A digest of the code that computes a module: its forward, and all that the forward calls.

Comments, annotations, docstrings, decorators and texts are no part of it, and neither are names of
classes. So modules of many families have one digest, and it stays through versions of a library
that change nothing but these.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gyre_trainer.layers.projections import is_transposed_linear
from gyre_trainer.rotation.guard import own_class, sets_forward

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
    is_of_library = cls.__module__ == "transformers.activations" and not value._parameters
    return cls in _ELEMENTWISE or is_of_library


def _code_of(module: nn.Module) -> Iterator[str]:
    if sets_forward(module):
        raise UnknownCode(f"{own_class(module).__name__} has a forward set on the instance")
    cls = own_class(module)
    if cls.__module__.startswith("torch.nn."):
        yield f"{cls.__module__}.{cls.__qualname__}"
    else:
        yield from _function_code(_function(cls, "forward"), cls, set())
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
    """The function of a class, without the decorators of its library.

    Raises:
        UnknownCode: it is none, or decorated by other code.
    """
    found = inspect.getattr_static(cls, name, None)
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    while isinstance(found, FunctionType) and hasattr(found, "__wrapped__"):
        # `functools.wraps` copies the name of the module, but not the globals
        if not _is_of(found.__globals__["__name__"], ("transformers", "torch")):
            raise UnknownCode(f"{cls.__name__}.{name} is wrapped")
        found = found.__wrapped__
    if not isinstance(found, FunctionType):
        raise UnknownCode(f"{cls.__name__}.{name} is no function of Python")
    return found


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
        yield from _function_code(_unwrapped(value), None, seen)
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


def _unwrapped(function: FunctionType) -> FunctionType:
    while hasattr(function, "__wrapped__") and isinstance(function.__wrapped__, FunctionType):
        if not _is_of(function.__globals__["__name__"], ("transformers", "torch")):
            raise UnknownCode(f"{function.__qualname__} is wrapped")
        function = function.__wrapped__
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
    own = {
        each.attr
        for each in ast.walk(plain)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == first
    }
    above = {
        each.attr
        for each in ast.walk(plain)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Call)
        and isinstance(each.value.func, ast.Name)
        and each.value.func.id == "super"
    }
    return ast.unparse(plain), tuple(sorted(names)), tuple(sorted(own)), tuple(sorted(above))


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
