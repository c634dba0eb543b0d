"""The installed package has all its files, imports only declared dependencies, and completes commands in shells."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Packages whose import name differs from their name in the registry.
IMPORTED_AS = {"liger-kernel": "liger_kernel", "pyyaml": "yaml"}
#: Packages that a declared dependency always installs: package, and that dependency.
BROUGHT_ALONG = {"megatron": "megatron-core", "starlette": "fastapi", "huggingface_hub": "transformers", "anyio": "mcp"}
#: Packages that only a user's script imports. Lightning's Trainer calls our callback.
OF_SCRIPTS = {"accelerate", "triton", "lightning", "pytorch_lightning"}


def of_the_package() -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / "zeroplan").rglob("*") if path.is_file() and path.suffix != ".pyc"}


def built(folder: Path) -> set[str]:
    """Return the files of the installed wheel, or if the package runs from source, of a wheel that is built now."""
    installed = {str(path) for path in files("zeroplan") or ()}
    if "zeroplan/__init__.py" in installed:
        return {path for path in installed if path.startswith("zeroplan/") and not path.endswith(".pyc")}
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="it is installed from its source, and hatchling is not here")
    (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    from zipfile import ZipFile

    with ZipFile(path) as archive:
        return {name for name in archive.namelist() if name.startswith("zeroplan/")}


def test_every_file_of_the_package_is_installed(tmp_path: Path):
    assert built(tmp_path) == of_the_package()


def _imported() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "zeroplan").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((alias.name.partition(".")[0], str(path)) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield node.module.partition(".")[0], str(path)


def test_every_import_is_of_a_dependency_or_an_extra():
    every = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]
    asked = {re.split(r"[\[>=<; ]", one)[0] for one in every}
    known = {IMPORTED_AS.get(name, name) for name in asked} | {one for one, whose in BROUGHT_ALONG.items() if whose in asked}
    foreign = {(name, where) for name, where in _imported() if name not in sys.stdlib_module_names | {"zeroplan"} | OF_SCRIPTS}
    assert {(name, where) for name, where in foreign if name not in known} == set()


def completed(shell: str, **said: str) -> str:
    environment = {**os.environ, "_ZEROPLAN_COMPLETE": f"complete_{shell}", "PYTHONPATH": str(ROOT), **said}
    program = "import sys; sys.argv[0] = 'zeroplan'; from zeroplan.cli.app import main; main()"
    return subprocess.run([sys.executable, "-c", program], env=environment, text=True, capture_output=True, check=True).stdout


def test_shells_complete_commands_and_flags():
    assert completed("bash", COMP_WORDS="zeroplan es", COMP_CWORD="1").split() == ["estimate"]
    assert "--model" in completed("zsh", _TYPER_COMPLETE_ARGS="zeroplan estimate --mo")
