"""Structs of msgspec are prepared at import, by one thread.

msgspec prepares a Struct when a type with it is first used. Where two threads do that at once, the
process crashes: seen with msgspec 0.22, when a daemon read the indexes of many shards.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROOMS = ("client", "common", "daemon", "trainer")


def structs_of(module: ast.Module) -> set[str]:
    """The classes of a module that are Structs."""
    return {
        node.name
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base) == "msgspec.Struct" for base in node.bases)
    }


def late_uses(module: ast.Module) -> list[str]:
    """Calls to msgspec inside of functions that name one of the module's Structs as a type."""
    structs = structs_of(module)
    return [
        ast.unparse(call)
        for function in ast.walk(module)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("msgspec.")
        if structs & {name.id for name in ast.walk(call) if isinstance(name, ast.Name)}
    ]


def test_structs_are_decoded_by_what_was_made_at_import() -> None:
    modules = {
        path: ast.parse(path.read_text()) for room in ROOMS for path in (ROOT / room).rglob("*.py")
    }
    with_structs = {path.name for path, module in modules.items() if structs_of(module)}
    assert {"file.py", "stored.py"} <= with_structs
    assert {
        path.name: found for path, module in modules.items() if (found := late_uses(module))
    } == {}


def test_a_late_use_is_found() -> None:
    source = (
        "class A(msgspec.Struct):\n  b: int\ndef f(t):\n  return msgspec.json.decode(t, type=A)"
    )
    assert late_uses(ast.parse(source)) == ["msgspec.json.decode(t, type=A)"]
