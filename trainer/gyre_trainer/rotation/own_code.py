"""Functions with code of their own, for the compiler.

The compiler keeps its graphs by the code of the function that was called, up to eight for each, and
runs what needs more as it is. The forward of a module's class is such a code. Of an object that is
called it takes one that all such objects have in common, so different kinds of blocks would share
eight graphs.
"""

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

_CALLS: WeakKeyDictionary[type, FunctionType] = WeakKeyDictionary()


def with_own_code(function: Callable[..., Any], kind: type) -> Callable[..., Any]:
    """The same function, whose code is another one for each ``kind`` if it is a callable object."""
    if isinstance(function, FunctionType | MethodType):
        return function
    if kind not in _CALLS:
        _CALLS[kind] = FunctionType(_call.__code__.replace(), globals(), _call.__name__)
    return MethodType(_CALLS[kind], function)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
