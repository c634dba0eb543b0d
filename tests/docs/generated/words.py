"""Tables of zeroplan's names and their meanings, from the classes that define them."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import pairwise
from typing import TYPE_CHECKING, get_args

import zeroplan
from tests.docs.generated.jobs import of
from tests.docs.generated.markdown import code, one_line, prose, table
from tests.engines_that_run import STAGES
from zeroplan.cli.job_flags import FLAGS
from zeroplan.engines.optimizers import IMPLEMENTATIONS
from zeroplan.ledger import Kind, Phase
from zeroplan.resolve import Request
from zeroplan.spec.base import Spec
from zeroplan.spec.batch import Batch, BatchSpec
from zeroplan.spec.family import FAMILIES
from zeroplan.spec.job import ENGINE_STAGES
from zeroplan.spec.mesh import Mesh, MeshSpec, Split
from zeroplan.spec.recipe import (
    Attention,
    DdpOptions,
    DeepSpeedOptions,
    Fsdp1Options,
    Fsdp2Options,
    Loss,
    MegatronOptions,
    Precision,
    RecipeSpec,
    Recompute,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
OPTIONS: dict[str, type[Spec]] = {
    "ddp": DdpOptions,
    "fsdp1": Fsdp1Options,
    "fsdp2": Fsdp2Options,
    "deepspeed": DeepSpeedOptions,
    "megatron": MegatronOptions,
}
_CHOICES = {"--precision": Precision, "--recompute": Recompute, "--attention": Attention, "--loss": Loss}


def documented(kind: type) -> dict[str, str]:
    """Return the meanings of a class's names: the strings written below them."""
    body = _body(kind)
    found = {}
    for named, text in pairwise(body):
        if (
            isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(named, (ast.Assign, ast.AnnAssign))
        ):
            target = named.target if isinstance(named, ast.AnnAssign) else named.targets[0]
            found[ast.unparse(target)] = one_line(str(text.value.value))
    return found


def kinds() -> str:
    """Return the table of the kinds of memory."""
    meanings = documented(Kind)
    return table(("kind", "what"), [(f"**{kind}**", meanings[kind.name]) for kind in Kind])


def phases() -> str:
    """Return the phases of a step as a sentence."""
    return ", ".join(f"*{phase}*" for phase in Phase) + ".\n"


def numbers() -> str:
    """Return the table of the numbers that describe a mesh and a batch."""
    rows = [
        (code(name), one_line(inspect.getdoc(value)))
        for kind in (Mesh, Split, Batch)
        for name, value in vars(kind).items()
        if isinstance(value, property)
    ]
    return table(("name", "what"), rows)


def choices() -> str:
    """Return the table of the values of a recipe's settings."""
    rows = [(code(flag), ", ".join(code(name) for name in get_args(choice))) for flag, choice in _CHOICES.items()]
    rows += [
        ("`--optimizer`", ", ".join(map(code, IMPLEMENTATIONS))),
        ("`family` of a model", ", ".join(map(code, FAMILIES))),
    ]
    return table(("where", "names"), rows)


def engines() -> str:
    """Return the table of engines and their stages."""
    rows = [
        (code(engine), f"[{name}]({_PAGES[engine]}.md)", str(stage))
        for engine, stages in ENGINE_STAGES.items()
        for stage, name in stages.items()
    ]
    return table(("`--engine`", "what runs", "`--stage`:"), rows)


_PAGES = {
    "paper": "model/states",
    "ddp": "model/ddp",
    "fsdp1": "model/fsdp1",
    "fsdp2": "model/fsdp2",
    "deepspeed": "model/deepspeed",
    "megatron": "megatron",
}


def options(engine: str) -> str:
    """Return the table of an engine's options: type, default and meaning."""
    return table(("option", "type", "default", "what"), _fields(OPTIONS[engine]))


def members(name: str) -> str:
    """Return the table of a public class's fields, properties and methods."""
    kind = getattr(zeroplan, name)
    given, worked_out = _fields(kind), list(_functions(kind))
    if not any(default for _, _, default, _ in given):
        return table(("name", "type", "what"), [*((field, kind, what) for field, kind, _, what in given), *worked_out])
    below = "\n" + table(("worked out", "type", "what"), worked_out) if worked_out else ""
    return table(("field", "type", "default", "what"), given) + below


def _fields(kind: type) -> list[tuple[str, ...]]:
    meanings = meant(kind)
    return [
        (
            code(ast.unparse(one.target)),
            code(_type(one.annotation)),
            code(_source(one.value)),
            meanings[ast.unparse(one.target)],
        )
        for one in _body(kind)
        if isinstance(one, ast.AnnAssign)
    ]


def _functions(kind: type) -> Iterator[tuple[str, ...]]:
    for one in _body(kind):
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_") and one.name != "check_rules":
            asked = [argument.arg for argument in one.args.args[1:]]
            name = one.name if one.decorator_list else f"{one.name}({', '.join(asked)})"
            yield code(name), code(_type(one.returns)), one_line(ast.get_docstring(one))


def meant(kind: type) -> dict[str, str]:
    """Return the meanings of a class's fields: from the class, from a flag's help, or from a protocol with the same names."""
    said = documented(kind)
    if kind is Request:
        flags = {flag.field: prose(flag.help) for flag in FLAGS}
        said = {"model": f"{flags['model']} Or a `ModelSpec`.", "gpu": f"{flags['gpu']} Or a `GpuSpec`.", **said}
        return {**documented(RecipeSpec), **flags, **said}
    asked = {MeshSpec: Mesh, BatchSpec: Batch}.get(kind)
    return {**said, **_asked_of(asked)} if asked else said


def _asked_of(protocol: type) -> dict[str, str]:
    """Return the meanings of a protocol's properties, inherited ones included."""
    asked = inspect.getmembers_static(protocol, lambda value: isinstance(value, property))
    return {name: one_line(inspect.getdoc(value)) for name, value in asked}


def _body(kind: type) -> list[ast.stmt]:
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    return body


def _type(annotation: ast.expr | None) -> str:
    """Return a type as text, without bounds of numbers and without the quotes of forward references."""
    written = "" if annotation is None else ast.unparse(annotation)
    written = written.strip("'") if isinstance(annotation, ast.Constant) else written
    return _INTEGER.sub("int", _BOUNDS.sub(r"\1", written)).replace("'", '"')


def _source(default: ast.expr | None) -> str:
    if default is None:
        return ""
    if isinstance(default, ast.Call) and ast.unparse(default.func) == "field":
        return _source(next(said.value for said in default.keywords if said.arg == "default"))
    return re.sub(r"\b\d{5,}\b", lambda found: f"{int(found[0]):_}", ast.unparse(default).replace("'", '"'))


_BOUNDS = re.compile(r"Annotated\[(\w+), Range\([^)]*\)\]")
_INTEGER = re.compile(r"\b(?:Count|CountOrZero|Degree|Dimension|Int)\b")


def engine_symbols() -> str:
    """Return every symbol of the engines' formulas that is not one of the model's, with the engines that use it."""
    found: dict[tuple[str, str], list[str]] = {}
    for engine, name, meaning in _symbols():
        seen = found.setdefault((name, meaning), [])
        if engine not in seen:
            seen.append(engine)
    return table(("symbol", "what", "in"), [(code(name), meaning, ", ".join(used)) for (name, meaning), used in found.items()])


def _symbols() -> Iterator[tuple[str, str, str]]:
    for engine, stage in (("paper", 3), *STAGES):
        for symbol in of(engine, stage).symbols:
            if symbol.name in ("Ψ", "N", "p"):  # the table of the model's symbols has them
                continue
            yield engine, symbol.name, symbol.meaning
