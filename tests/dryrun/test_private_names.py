"""The list of torch's private names that zeroplan uses is complete, and the installed torch has all of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import zeroplan
from zeroplan.verify.fake_cuda import private_names

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
ROOT = Path(zeroplan.__file__).parent
FOLDERS = ("dryrun", "verify/fake_cuda", "verify/watching", "verify/fake_parts")
_REPLACE = ("put", "replaced")


def test_the_installed_torch_has_every_private_name():
    assert private_names.lacking(private_names.gone()) == ""


def test_the_list_has_every_private_name_that_the_code_uses():
    listed = (*private_names.NAMES, *private_names.OF_SOME_BUILDS)
    used = {name for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") for name in private(file)}
    missing = [name for name in used if not any(one == name or one.startswith(f"{name}.") for one in listed)]
    assert not missing, f"add to private_names.txt beside {private_names.__file__}: {missing}"


def private(file: Path) -> set[str]:
    """Return the private names of torch in a file: names that it imports, reads as attributes, or replaces."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    aliases = {"torch": "torch"} | {own: name for name, own in imported(tree) if own}
    found = {name for name, _ in imported(tree)} | set(reached(tree, aliases))
    return {name for name in found if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))}


def imported(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Yield the names of torch that a file imports, and the file's own names for them."""
    for node in ast.walk(tree):
        module = getattr(node, "module", None) or ""
        for one in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            name = f"{module}.{one.name}" if module else one.name
            if name.split(".")[0] == "torch":
                yield name, one.asname or (one.name if module else None)


def reached(tree: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    """Yield the names of torch that a file reads as attributes, or replaces by keyword or by string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node, aliases)):
            yield name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _REPLACE and node.args:
            owner = dotted(node.args[0], aliases)
            named = [one.arg for one in node.keywords] + [one.value for one in node.args[1:] if isinstance(one, ast.Constant)]
            yield from (f"{owner}.{name}" for name in named if owner and name)


def dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """Return the full name of an expression, or None if it does not begin with torch."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    owner = dotted(node.value, aliases) if isinstance(node, ast.Attribute) else None
    return f"{owner}.{node.attr}" if owner and isinstance(node, ast.Attribute) else None
