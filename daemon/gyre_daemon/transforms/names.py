"""Which transforms there are, by name. Nothing of theirs is imported here."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from gyre_daemon.errors import ConfigError, NotAllowed
from gyre_daemon.runtime.plug_ins import entry_points_of, included
from gyre_daemon.transforms.messages import Step

GROUP = "gyre.transforms"
_HERE = "gyre_daemon.transforms"
BUILT_IN: Mapping[str, str] = {
    "cache": f"{_HERE}.built_in:Cache",
    "copy": f"{_HERE}.built_in:Copy",
    "drop": f"{_HERE}.built_in:Drop",
    "cast": f"{_HERE}.built_in:Cast",
    "crop_or_pad": f"{_HERE}.built_in:CropOrPad",
    "truncate": f"{_HERE}.built_in:Truncate",
    "tokenize": f"{_HERE}.tokens:Tokenize",
    "chat": f"{_HERE}.chat:Chat",
    "python": f"{_HERE}.function:PythonFunction",
}
_FUNCTION = "python"
# Options with paths. Clients of a shared daemon must not have it open files of their choice.
_FILES: Mapping[str, str] = {"tokenize": "tokenizer", "chat": "tokenizer"}
# Most chains have a dozen transforms, and ten views of an image some eighty. More would let one
# request take the memory of a worker.
_MAX_STEPS = 128
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def own_target(name: str) -> str:
    """The place of a transform of the daemon or of `gyre_media`; empty for other names."""
    return BUILT_IN.get(name) or (included(GROUP)[name].value if name in included(GROUP) else "")


def to_steps(
    declared: Collection[Mapping[str, Any]],
    installed: Collection[str],
    *,
    allow_modules: bool,
    allow_files: bool,
) -> list[Step]:
    """The declared transforms, each with the place of its class.

    Args:
        declared: tables with the key `name` and the options.
        installed: names of other packages' transforms that the operator enables.
        allow_modules: whether a name may be `MODULE:CLASS`.
        allow_files: whether options may be paths.

    Raises:
        ConfigError: a name is missing or unknown.
        NotAllowed: `MODULE:CLASS` is not served here, or a path.
    """
    if len(declared) > _MAX_STEPS:
        raise ConfigError(f"there are {len(declared)} transforms; at most {_MAX_STEPS} are served")
    steps = []
    for place, table in enumerate(declared):
        options = dict(table)
        name = options.pop("name", None)
        if not isinstance(name, str) or not name:
            raise ConfigError(f'transforms[{place}] has no name; give it one, name = "crop_or_pad"')
        path = options.get(_FILES.get(name, ""))
        if isinstance(path, str) and "/" in path and not allow_files:
            raise NotAllowed(
                f"transforms[{place}] ({name}): this daemon opens no files that clients name. Ask "
                "its operator to declare the transform with the dataset, or use a private daemon."
            )
        steps.append(Step(name, _target(place, name, installed, allow_modules), options))
    return steps


def _target(place: int, name: str, installed: Collection[str], allow_modules: bool) -> str:
    if name == _FUNCTION and not allow_modules:
        raise NotAllowed(
            f"transforms[{place}]: this daemon runs no functions of scripts. Ask its operator to "
            f"install a package with an entry point of the group {GROUP}, or use a private daemon"
        )
    if target := own_target(name):
        return target
    if ":" in name:
        if not _TARGET.fullmatch(name):
            raise ConfigError(f"transforms[{place}]: {name!r:.100} is not of the form MODULE:CLASS")
        if not allow_modules:
            raise NotAllowed(
                f"transforms[{place}]: this daemon runs no code that clients name ({name:.100}). "
                f"Ask its operator to install a package with an entry point of the group {GROUP}, "
                "or use a private daemon."
            )
        return name
    found = {entry.value for entry in entry_points_of(GROUP, name)}
    if found and name not in installed:
        fix = "Ask the operator to list it in `installed_transforms` of the daemon's configuration"
        if allow_modules:
            fix = f"Name its class: {min(found)}"
        raise ConfigError(f"transforms[{place}]: {name!r:.100} is installed and not enabled. {fix}")
    if not found:
        known = ", ".join(sorted({*BUILT_IN, *included(GROUP), *installed}))
        raise ConfigError(
            f"transforms[{place}] is {name!r:.100}, and there is no such transform; there are "
            f"{known}"
        )
    if len(found) > 1:
        raise ConfigError(
            f"transforms[{place}]: several packages declare {name!r:.100}: "
            f"{', '.join(sorted(found))}; uninstall all but one"
        )
    return found.pop()
