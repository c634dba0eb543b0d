"""Nothing that a user hands over is run: no pickle is loaded as such, nothing is evaluated, no shell is asked."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import zeroplan

PACKAGE = Path(zeroplan.__file__).parent
#: Names that are not called, whatever they are called on; of ``load`` those of modules that build objects.
FORBIDDEN = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.execvp", "os.execve", "pty.spawn",
             "pickle.load", "pickle.loads", "marshal.load", "marshal.loads", "shelve.open", "yaml.unsafe_load", "yaml.full_load",
             "yaml.load_all", "torch.load", "runpy.run_path", "runpy.run_module", "builtins.eval", "builtins.exec"}  # fmt: skip


def dotted(node: ast.expr) -> str:
    """``os.system`` of a call to it; nothing of what is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def faults(text: str) -> list[str]:
    """Every call in a module that runs what it is given."""
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


#: A dry run runs the script that the user names, which is what the command is for; its ranks read what they pickle for each other.
ON_PURPOSE = {"dryrun/parcels.py": ["pickle.loads"], "dryrun/script.py": ["runpy.run_module", "runpy.run_path"]}


def test_nothing_in_the_package_runs_what_it_is_given():
    found = {
        path.relative_to(PACKAGE).as_posix(): sorted(faults(path.read_text(encoding="utf-8"))) for path in PACKAGE.rglob("*.py")
    }
    assert {name: each for name, each in found.items() if each} == ON_PURPOSE


def test_modules_are_imported_by_name_in_few_places():
    """All but two are the package's own: modules of torch, from a list, and what ``--workload`` names, which that flag is for."""
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
        "verify/training/user_workload.py",
    ]


def test_the_one_reader_of_yaml_is_a_safe_one():
    """Its class stands in the function that reads: no other way leads to ``yaml.load``."""
    text = (PACKAGE / "catalog" / "setups" / "parsing.py").read_text(encoding="utf-8")
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == "Loader"]
    assert [dotted(base) for one in classes for base in one.bases] == ["yaml.SafeLoader"]
    readers = [path.name for path in PACKAGE.rglob("*.py") if "import yaml" in path.read_text(encoding="utf-8")]
    assert readers == ["parsing.py"]


@pytest.mark.parametrize("text", [
    "eval('1')", "import os\nos.system('ls')", "subprocess.run('ls', shell=True)", "subprocess.run('ls', shell=x)",
    "import pickle\npickle.load(file)", "yaml.load(text)", "yaml.load(text, yaml.UnsafeLoader)", "from pickle import loads",
])  # fmt: skip
def test_a_fault_is_found(text: str):
    assert faults(text)
