"""The package runs nothing that a user hands over: it loads no pickle as such, evaluates no text and starts no shell."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import zeroplan

PACKAGE = Path(zeroplan.__file__).parent
#: Functions that the package must not call.
FORBIDDEN = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.execvp", "os.execve", "pty.spawn",
             "pickle.load", "pickle.loads", "marshal.load", "marshal.loads", "shelve.open", "yaml.unsafe_load", "yaml.full_load",
             "yaml.load_all", "torch.load", "runpy.run_path", "runpy.run_module", "builtins.eval", "builtins.exec"}  # fmt: skip


def dotted(node: ast.expr) -> str:
    """Return a function's name with dots, such as ``os.system``; an empty text for what is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def faults(text: str) -> list[str]:
    """Return every call in a module's text that would run what it is given."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "marshal", "os", "subprocess"):
            found += [f"{node.module}.{one.name}" for one in node.names if f"{node.module}.{one.name}" in FORBIDDEN]
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in FORBIDDEN:
            found.append(name)
        if name == "yaml.load" and not (len(node.args) == 2 and dotted(node.args[1]) == "Loader"):
            found.append("yaml.load without a safe reader")
        if any(
            one.arg == "shell" and not (isinstance(one.value, ast.Constant) and one.value.value is False)
            for one in node.keywords
        ):
            found.append(f"{name}(shell=...)")
    return found


#: Exceptions: a dry run is meant to run the user's script, and its ranks read pickles that they write for each other.
ON_PURPOSE = {"dryrun/sent_objects.py": ["pickle.loads"], "dryrun/script.py": ["runpy.run_module", "runpy.run_path"]}


def test_nothing_in_the_package_runs_what_it_is_given():
    found = {
        path.relative_to(PACKAGE).as_posix(): sorted(faults(path.read_text(encoding="utf-8"))) for path in PACKAGE.rglob("*.py")
    }
    assert {name: each for name, each in found.items() if each} == ON_PURPOSE


def test_modules_are_imported_by_name_in_few_places():
    """Five import modules of others: names in torch and what an engine needs, from lists, DeepSpeed, LOMO, and ``--workload``."""
    found = [
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if "import_module(" in path.read_text("utf-8")
    ]
    assert sorted(found) == [
        "__init__.py",
        "catalog/setups/reading.py",
        "cli/plotting.py",
        "cli/quick.py",
        "engines/requests/__init__.py",
        "estimator.py",
        "hooks/__init__.py",
        "transformer/families/definition.py",
        "verify/fake_cuda/private_names.py",
        "verify/processes/warm.py",
        "verify/training/deepspeed.py",
        "verify/training/optimizers.py",
        "verify/training/user_workload.py",
    ]


def test_yaml_is_read_in_one_place_and_safely():
    """The one module that imports ``yaml`` reads with a subclass of ``SafeLoader``."""
    text = (PACKAGE / "catalog" / "setups" / "parsing.py").read_text(encoding="utf-8")
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == "Loader"]
    assert [dotted(base) for one in classes for base in one.bases] == ["yaml.SafeLoader"]
    readers = [path.name for path in PACKAGE.rglob("*.py") if "import yaml" in path.read_text(encoding="utf-8")]
    assert readers == ["parsing.py"]


@pytest.mark.parametrize("text", [
    "eval('1')", "import os\nos.system('ls')", "subprocess.run('ls', shell=True)", "subprocess.run('ls', shell=x)",
    "import pickle\npickle.load(file)", "yaml.load(text)", "yaml.load(text, yaml.UnsafeLoader)", "from pickle import loads",
])  # fmt: skip
def test_an_unsafe_call_is_found(text: str):
    assert faults(text)
