"""Functions of a script as transforms in a private daemon, and its classes as formats and storages.

A function is pickled into a file in the private daemon's folder, and its digest into the chain. The
daemon runs it in worker processes. It learns the fields that it makes from one sample; the daemon
has [Note: Functions of a script]. A class is pickled in the same way, and the definition of the
dataset names its file.
"""

import functools
import hashlib
import inspect
import io
import json
import pickle
import secrets
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display import first_samples
from gyre_client.errors import InvalidRequest, NotInstalled
from gyre_client.transport.arguments import shown, transform_list
from gyre_client.transport.connection import OPEN_TIMEOUT_S, Connection
from gyre_client.transport.run import FUNCTIONS
from gyre_client.transport.target import PrivateDaemon, Target

_VARIES = -1
_LEARNT = "learnt"
_ROLES = ("__func__", "fget")  # of class methods, static methods and properties
_OPTIONS = frozenset({"name", "max_length"})

Step = Mapping[str, object] | Callable[..., Any]


def declared_or_functions(
    transform: Sequence[Step] | None,
) -> tuple[pb.TransformList | None, Sequence[Step]]:
    """Returns the message that declares a chain, or a chain with functions in it.

    Raises:
        InvalidRequest: See `transform_list`.
    """
    if isinstance(transform, Sequence) and any(_function_of(each) for each in transform):
        return None, transform
    return None if transform is None else transform_list(transform), ()  # type: ignore[arg-type]


def declare_functions(
    transform: Sequence[Step], target: Target, dataset: pb.DatasetRef
) -> pb.TransformList:
    """Returns a chain in which declared steps stand for the functions.

    Of the dataset only its samples matter, not how they are packed.

    Raises:
        InvalidRequest: The daemon is not a private one, a function cannot be pickled, or an option
            does not fit.
        GyreError: The daemon refuses the dataset, or the function fails with its first sample.
    """
    unpacked = pb.DatasetRef()
    unpacked.CopyFrom(dataset)
    unpacked.ClearField("pack")
    declared: list[Mapping[str, object]] = []
    for place, step in enumerate(transform):
        function = _function_of(step)
        if function is None:
            declared.append(step)  # type: ignore[arg-type]
            continue
        where = f"transform[{place}] ({_title(function)})"
        if target.private is None:
            raise InvalidRequest(
                f"{where}: a shared daemon runs no functions of scripts. Pass the dataset's path, "
                "so that a private daemon reads it, or ask the operator to install a package with "
                "an entry point of the group gyre.transforms"
            )
        lengths = _max_lengths(step, where)
        digest, path = _written(function, target.private, where)
        options = {
            "name": "python",
            "title": _title(function),
            "function": digest,
            "payload": path,
            "is_drawing": _takes_rng(function, where),
        }
        fields = _learnt(target, unpacked, [*declared, {**options, "fields": {}}], lengths, where)
        declared.append({**options, "fields": fields})
        declared += [
            {"name": "crop_or_pad", "field": name, "length": length}
            for name, length in lengths.items()
            if length is not None
        ]
    return transform_list(declared)


def declare_classes(
    dataset: pb.DatasetRef, data_format: object, storage: object, target: Target
) -> None:
    """Writes classes of the script to files, and their paths into the definition of a dataset.

    A format that is no class stays as it is; without `storage` the daemon reads the dataset.

    Raises:
        InvalidRequest: The daemon is not a private one, a class cannot be pickled, `storage` is no
            class, or the dataset has no scheme.
    """
    if storage is not None and not isinstance(storage, type):
        raise InvalidRequest(
            f"storage: not a class (got {shown(storage)}). Pass a subclass of "
            "fsspec.AbstractFileSystem, and its arguments as options={'storage': {...}}"
        )
    for argument, value in (("format", data_format), ("storage", storage)):
        if not isinstance(value, type):
            continue
        where = f"{argument} ({value.__qualname__})"
        if target.private is None or not dataset.HasField("ad_hoc"):
            raise InvalidRequest(
                f"{where}: a shared daemon runs no classes of scripts. Pass the dataset's path or "
                "URI without `address`, so that a private daemon reads it"
            )
        uri = dataset.ad_hoc.uri
        if argument == "storage" and "://" not in uri:
            raise InvalidRequest(
                f"{where}: the dataset has no scheme (got {uri!r}). Write it as my://folder"
            )
        path = _written(value, target.private, where)[1]
        if argument == "format":
            dataset.ad_hoc.format = path
        else:
            table = dataset.ad_hoc.options["storage"].table
            table.values["class"].text = path


def _function_of(step: object) -> Callable[..., Any] | None:
    found = step.get("name") if isinstance(step, Mapping) else step
    return found if callable(found) else None


def _title(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        return _title(function.func)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _max_lengths(step: object, where: str) -> dict[str, int | None]:
    """Returns the option `max_length`."""
    if not isinstance(step, Mapping):
        return {}
    if unknown := sorted(map(str, step.keys() - _OPTIONS)):
        raise InvalidRequest(f"{where}: no option {unknown[0]!r}. A function has only max_length")
    found = step.get("max_length", {})
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and (length is None or (type(length) is int and length > 0))
        for name, length in found.items()
    ):
        raise InvalidRequest(
            f"{where}: max_length is {shown(found)}. Pass a dict, such as {{'tokens': 512}}, or "
            "None in place of a number to have the lengths measured"
        )
    return dict(found)


def _learnt(
    target: Target,
    dataset: pb.DatasetRef,
    chain: Sequence[Mapping[str, object]],
    lengths: Mapping[str, int | None],
    where: str,
) -> dict[str, dict[str, object]]:
    """Returns the dtype and shape of each field that the last step of a chain makes."""
    transforms = transform_list(chain)
    with Connection(target.address) as connection:
        described = connection.describe(dataset, OPEN_TIMEOUT_S, transforms=transforms)
        samples = first_samples(connection, dataset, described, 1, 0, transforms)
    if not samples:
        raise InvalidRequest(f"{where}: the dataset has no sample to learn its fields from")
    found: dict[str, tuple[str, list[int]]] = json.loads(bytes(samples[0].values[_LEARNT].data))
    for name in lengths:
        if name not in found or not found[name][1]:
            raise InvalidRequest(
                f"{where}: max_length names {name!r}, and the function returns no sequence of that "
                f"name (got {', '.join(sorted(found))})"
            )
    for name, (_, shape) in found.items():
        if 0 in shape[name in lengths :]:
            remedy = "Return at least one element for each sample"
            if 0 not in shape[1:]:
                remedy = (
                    "If its length varies, pass {'name': function, 'max_length': "
                    f"{{{name!r}: N}}}}; None for N has the lengths measured"
                )
            raise InvalidRequest(
                f"{where}: {name!r} is {shape} for the sample that fields are learnt from. {remedy}"
            )
    return {
        name: {"dtype": dtype, "shape": [_VARIES, *shape[1:]] if name in lengths else shape}
        for name, (dtype, shape) in found.items()
    }


def _written(value: Any, daemon: PrivateDaemon, where: str) -> tuple[str, str]:
    """Writes the file of a function or class, if it is not there; returns its digest and path."""
    pickled = _pickled(value, where)
    digest = _Digest()
    digest.add(value)
    folder = daemon.log_path.parent / FUNCTIONS
    name = "".join(each for each in _title(value) if each.isalnum())
    path = folder / f"{name:.50}-{digest.text()}.pickle"
    if not path.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = path.with_suffix(f".{secrets.token_hex(8)}")
        search = [str(Path(each).resolve()) for each in sys.path]  # "" is the working directory
        with unfinished.open("wb") as file:
            origin = {"path": search, "lines": digest.lines, "modules": digest.modules}
            pickle.dump(origin, file)
            file.write(pickled)
        unfinished.rename(path)
    return digest.text(), str(path)


def _takes_rng(function: Callable[..., Any], where: str) -> bool:
    try:
        return "rng" in inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{where}: its parameters are not known: {error}") from error


def _pickled(function: Callable[..., Any], where: str) -> bytes:
    try:
        return _dumps(function)
    except NotInstalled:
        raise
    except Exception as error:
        named = _unpicklable(function)
        what = f"captures {named}" if named else "is of a kind"
        raise InvalidRequest(
            f"{where}: it {what} that cannot be pickled: {error!s:.200}. Create it inside the "
            "function, or pass a class with __getstate__"
        ) from error


def _dumps(value: object) -> bytes:
    """Pickles a value; functions of the script by value."""
    try:
        import cloudpickle  # noqa: PLC0415  # it is optional
    except ImportError as error:
        raise NotInstalled.needs("a function of a script", "cloudpickle", "client") from error
    if not isinstance(value, type):
        return bytes(cloudpickle.dumps(value))

    class ClassPickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Makes the locks of a class anew, as fsspec's classes have one."""

        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
            {type(threading.RLock()): lambda _: (threading.RLock, ())}
        )

    file = io.BytesIO()
    ClassPickler(file).dump(value)
    return file.getvalue()


def _unpicklable(function: Callable[..., Any]) -> str:
    """Returns the captured value that cannot be pickled; empty if it is not known."""
    for name, value in _captured(function):
        try:
            _dumps(value)
        except Exception:
            return f"{name!r}, {shown(value)},"
    return ""


def _captured(function: Callable[..., Any]) -> list[tuple[str, object]]:
    """Returns the objects outside of itself that a function refers to, by name."""
    if isinstance(function, functools.partial):
        parts: list[tuple[str, object]] = [("func", function.func)]
        parts += [(f"args[{place}]", value) for place, value in enumerate(function.args)]
        return parts + sorted(function.keywords.items())
    if isinstance(function, types.MethodType):
        return [("self", function.__self__), ("func", function.__func__)]
    if not isinstance(function, types.FunctionType):
        return sorted(vars(function).items()) if hasattr(function, "__dict__") else []
    captured = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            captured.append((name, cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    captured += [("defaults", function.__defaults__), ("defaults", function.__kwdefaults__)]
    names = sorted(_names_in(function.__code__) & function.__globals__.keys())
    return captured + [(name, function.__globals__[name]) for name in names]


def _text_of_code(code: types.CodeType) -> str:
    constants = [
        _text_of_code(each)
        if isinstance(each, types.CodeType)
        else repr(sorted(each, key=repr) if isinstance(each, frozenset) else each)
        for each in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _names_in(code: types.CodeType) -> set[str]:
    nested = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names_in, nested))


_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


def _is_installed(module: types.ModuleType) -> bool:
    return (getattr(module, "__file__", None) or _INSTALLED[0]).startswith(_INSTALLED)


class _Digest:
    """A digest of the sources of functions and of the values that they capture.

    Attributes:
        lines: The number of the first line and the lines of each function, by file.
        modules: A digest of the source of each module of the script, by file.
    """

    def __init__(self) -> None:
        self.lines: dict[str, tuple[int, list[str]]] = {}
        self.modules: dict[str, str] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self._seen: set[int] = set()

    def text(self) -> str:
        """Returns the digest in hexadecimal."""
        return self._digest.hexdigest()

    def add(self, value: object) -> None:
        """Adds a function with all that it captures, or any other value."""
        if id(value) in self._seen and not isinstance(value, int | float | str | bytes | bool):
            return self._put("again")
        self._seen.add(id(value))
        if isinstance(value, types.ModuleType):
            return self._put(value.__name__, "" if _is_installed(value) else self._source(value))
        if isinstance(value, type):
            return self._add_class(value)
        if isinstance(value, types.BuiltinFunctionType):
            return self._put(f"{value.__module__}.{value.__qualname__}")
        if not isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            if callable(value):
                self._put(self._source(type(value)))
            return self._put(hashlib.blake2b(_dumps(value)).hexdigest())
        self._put(_title(value))
        is_importable = getattr(value, "__module__", "__main__") != "__main__"
        if isinstance(value, types.FunctionType):
            module = sys.modules.get(value.__module__)
            self._put(self._source(value))
            if is_importable and not value.__closure__:
                return self._put(self._source(module)) if module else None
        for name, each in _captured(value):
            self._put(name)
            self.add(each)
        return None

    def _add_class(self, value: type) -> None:
        self._put(f"{value.__module__}.{value.__qualname__}", self._source(value))
        if value.__module__ != "__main__":
            return
        for base in value.__bases__:
            self.add(base)
        for name, each in sorted(vars(value).items()):  # a notebook has no source of classes
            for part in (each, *(getattr(each, role, None) for role in _ROLES)):
                if isinstance(part, types.FunctionType):
                    self._put(name)
                    self.add(part)
            if not name.startswith("__") and isinstance(each, int | float | str | bytes | tuple):
                self._put(name, repr(each))

    def _source(self, value: Any) -> str:
        """Returns the source text; where there is none, the code."""
        code = getattr(value, "__code__", None)
        try:
            # of a function, that of its own code: not of the one inside
            lines, first = inspect.getsourcelines(code or value)
        except (OSError, TypeError):
            return _text_of_code(code) if code else ""
        if isinstance(value, types.FunctionType):
            self.lines[value.__code__.co_filename] = first, lines
        file = Path(getattr(value, "__file__", None) or "").absolute()
        if isinstance(value, types.ModuleType) and file.is_file():  # none of a zip archive
            text = "".join(lines).encode("utf-8", "surrogateescape")
            self.modules[str(file)] = hashlib.blake2b(text).hexdigest()
        if code and code.co_name == "<lambda>":  # several may have the same lines
            return "".join([*lines, _text_of_code(code)])
        return "".join(lines)

    def _put(self, *texts: str) -> None:
        for each in texts:
            self._digest.update(f"{len(each)}:".encode() + each.encode("utf-8", "surrogateescape"))
