"""Cuts Gyre's own frames out of the tracebacks of its errors, so that the message comes last.

An error of Gyre has the problem and the fix in its message; the frames between the caller's
line and the place that found it help only those who look for a fault in Gyre. With
`GYRE_TRACEBACK=1` in the environment, nothing is cut. Errors of other kinds keep all frames.
"""

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gyre_client.errors import GyreError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def fold(error: GyreError) -> None:
    """Cut the frames and causes that an error has so far; raise it on with a bare `raise`.

    A bare `raise` adds no frame, so the traceback begins with the caller's.
    """
    if os.environ.get("GYRE_TRACEBACK") != "1":
        error.__traceback__ = error.__cause__ = None
        error.__suppress_context__ = True


def folded(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make the tracebacks of a public function's errors begin with the caller."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except GyreError as error:
            fold(error)
            raise

    return call
