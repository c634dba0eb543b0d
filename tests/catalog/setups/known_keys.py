"""Writes the table of keys that other programs' own code knows: ``python -m tests.catalog.setups.known_keys FOLDER``.

The folder has one folder per project, at the commits that docs/from-a-file.md lists. A key is known by its last word: a field of a
class, an argument of a parser, a key of a default configuration, or, where any function can be named in a file, a parameter.
Keys that may change memory (memory_keys.toml) are left out: a reader reads them, or they are noted.
"""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from zeroplan.catalog.setups import settings

#: By kind: folders of classes and parsers, of functions that a file can name, and of YAML with defaults.
SOURCES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "verl": (("verl/verl/workers/config", "verl/verl/trainer", "verl/verl/utils", "Megatron-LM/megatron/core"), (),
             ("verl/verl/trainer/config",)),
    "ms-swift": (("ms-swift/swift/arguments", "ms-swift/swift/megatron/arguments", "ms-swift/swift/trainers",
                  "ms-swift/swift/rlhf_trainers", "=transformers/training_args.py"), (), ()),
    "llama-factory": (("LLaMA-Factory/src/llamafactory/hparams", "=transformers/training_args.py"), (), ()),
    "axolotl": (("axolotl/src/axolotl/utils/schemas", "axolotl/src/axolotl/integrations", "=transformers/training_args.py"),
                (), ()),
    "openrlhf": (("OpenRLHF/openrlhf",), (), ()),
    "torchtune": ((), ("torchtune/torchtune", "torchtune/recipes", "=torch/optim", "=bitsandbytes/optim"), ()),
    "automodel": ((), ("Automodel/nemo_automodel", "=torch/optim", "=bitsandbytes/optim"), ()),
    "megatron": (("Megatron-LM", "Megatron-Bridge/src/megatron/bridge/training"), (), ()),
    "nanotron": (("nanotron/src/nanotron/config",), (), ()),
    "lightning": ((), ("litgpt/litgpt", "lightning/pytorch", "=torch/optim", "=bitsandbytes/optim"), ()),
}  # fmt: skip
#: Code of images, whose parameters are no keys of a recipe.
_LEFT_OUT = ("/diffusion/", "/tests/")
_CONFIGS = re.compile(r"(^|\.)(cfg|config|args|\w+_(cfg|config|args))$")


def names_of(kind: str, folder: Path) -> set[str]:
    """Return the last words of all keys that a program's code knows."""
    classes, functions, defaults = SOURCES[kind]
    found = {name for path in _files(folder, classes, ".py") for name in _declared(ast.parse(path.read_text()))}
    for path in _files(folder, functions, ".py"):
        tree = ast.parse(path.read_text())
        found |= {*_declared(tree), *_parameters(tree)}
    for path in _files(folder, defaults, ".yaml"):
        found |= set(_keys(yaml.safe_load(path.read_text())))
    words = {word.lstrip("-").replace("-", "_").rpartition(".")[2] for word in found}
    return {word for word in words if re.fullmatch(r"[A-Za-z]\w{1,60}", word) and settings.may_matter(word) is False}


def _files(folder: Path, names: tuple[str, ...], suffix: str) -> Iterator[Path]:
    for name in names:
        package, _, rest = name.removeprefix("=").partition("/")
        root = folder / name if not name.startswith("=") else Path(str(_origin(package))).parent / rest
        files = sorted(root.rglob(f"*{suffix}")) if root.is_dir() else [root]
        yield from (file for file in files if not any(part in str(file) for part in _LEFT_OUT))


def _origin(package: str) -> str:
    found = importlib.util.find_spec(package)
    assert found is not None, package
    assert found.origin is not None, package
    return found.origin


def _declared(tree: ast.AST) -> Iterator[str]:
    """Yield fields of classes, and arguments of parsers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (
                one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            )
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield from _texts(node.args)
            yield from _texts([one.value for one in node.keywords if one.arg == "dest"])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"--[a-z][\w-]+", node.value):
            yield node.value  # a parser's argument, made of a field


def _parameters(tree: ast.AST) -> Iterator[str]:
    """Yield parameters of functions, and keys that code looks up: ``cfg.name`` and ``cfg.get("name")``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from (one.arg for one in (*node.args.args, *node.args.kwonlyargs) if one.arg != "self")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            yield from _texts(node.args[:1])
        elif isinstance(node, ast.Attribute) and _CONFIGS.search(ast.unparse(node.value)):
            yield node.attr


def _texts(nodes: list[ast.expr]) -> Iterator[str]:
    yield from (one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str))


def _keys(data: object) -> Iterator[str]:
    if isinstance(data, dict):
        yield from (str(key) for key in data)
    for one in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _keys(one)


def main(folder: Path) -> None:
    """Write the table: a line for each kind."""
    lines = (f"{kind}: {' '.join(sorted(names_of(kind, folder)))}" for kind in SOURCES)
    settings.KNOWN_KEYS.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
