"""Tables of the names that the program uses, from the classes that define them."""

from __future__ import annotations

import ast
import inspect
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import TYPE_CHECKING, get_args

from tests.docs.generated.jobs import of
from tests.docs.generated.ledger import STAGES
from tests.docs.generated.markdown import code, one_line, table
from zeroplan.engines.optimizers import IMPLEMENTATIONS
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.batch import Batch
from zeroplan.spec.job import ENGINE_STAGES
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import FAMILIES
from zeroplan.spec.recipe import Attention, DdpOptions, DeepSpeedOptions, Fsdp2Options, Loss, Precision, Recompute

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zeroplan.spec.base import Spec

OPTIONS: dict[str, type[Spec]] = {"ddp": DdpOptions, "fsdp2": Fsdp2Options, "deepspeed": DeepSpeedOptions}
_CHOICES = {"--precision": Precision, "--recompute": Recompute, "--attention": Attention, "--loss": Loss}


def documented(kind: type) -> dict[str, str]:
    """What stands in a string below each name of a class: its meaning."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
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
    """The kinds of memory."""
    meanings = documented(Kind)
    return table(("kind", "what"), [(f"**{kind}**", meanings[kind.name]) for kind in Kind])


def phases() -> str:
    """The phases of a step, in words."""
    return ", ".join(f"*{phase}*" for phase in Phase) + ".\n"


def numbers() -> str:
    """The numbers that describe a mesh and a batch."""
    rows = [
        (code(name), one_line(inspect.getdoc(value)))
        for kind in (Mesh, Batch)
        for name, value in vars(kind).items()
        if isinstance(value, property)
    ]
    return table(("name", "what"), rows)


def choices() -> str:
    """The names that a recipe is said in."""
    rows = [(code(flag), ", ".join(code(name) for name in get_args(choice))) for flag, choice in _CHOICES.items()]
    rows += [
        ("`--optimizer`", ", ".join(map(code, IMPLEMENTATIONS))),
        ("`family` of a model", ", ".join(map(code, FAMILIES))),
    ]
    return table(("where", "names"), rows)


def engines() -> str:
    """The engines with their stages."""
    rows = [
        (code(engine), f"[{name}](model/{_PAGES[engine]}.md)", str(stage))
        for engine, stages in ENGINE_STAGES.items()
        for stage, name in stages.items()
    ]
    return table(("`--engine`", "what runs", "`--stage`:"), rows)


_PAGES = {"paper": "states", "ddp": "ddp", "fsdp2": "fsdp2", "deepspeed": "deepspeed"}


def options(engine: str) -> str:
    """The options of an engine, their defaults and what they mean."""
    kind = OPTIONS[engine]
    meanings = documented(kind)
    rows = [(code(field.name), code(_default(field.default)), meanings.get(field.name, "")) for field in fields(kind)]
    return table(("option", "default", "what"), rows)


def _default(value: object) -> str:
    if value is MISSING or value is None:
        return "" if value is MISSING else "None"
    return f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def engine_symbols() -> str:
    """Every symbol that formulas of engines use beyond the model's, by engine."""
    found: dict[tuple[str, str], list[str]] = {}
    for engine, name, meaning in _symbols():
        seen = found.setdefault((name, meaning), [])
        if engine not in seen:
            seen.append(engine)
    return table(("symbol", "what", "in"), [(code(name), meaning, ", ".join(used)) for (name, meaning), used in found.items()])


def _symbols() -> Iterator[tuple[str, str, str]]:
    for engine, stage in (("paper", 3), *STAGES):
        for symbol in of(engine, stage).symbols:
            if symbol.name in ("Ψ", "N", "p"):  # they stand among the model's
                continue
            yield engine, symbol.name, symbol.meaning
