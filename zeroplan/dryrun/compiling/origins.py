"""Which module and line of the user's code does a line of inductor's generated program come from?"""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from zeroplan.verify.fake_cuda.stand_ins import user_line

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


class Origin(NamedTuple):
    """The origin of a piece of a compiled graph.

    ``module`` is the name within the compiled module; ``line`` is the user's source line, empty for a library's code.
    """

    module: str
    line: str
    operation: str


class Origins:
    """The programs that inductor has written so far, with the origins of their lines."""

    def __init__(self) -> None:
        self._programs: dict[str, tuple[list[int], list[Origin]]] = {}

    def learn(self, path: str, lines: Sequence[tuple[int, Any]], names: Mapping[int, str], root: str) -> None:
        """Store a program's map from line numbers to graph nodes. ``root`` is the module that runs during compilation."""
        found = [(number, _origin(node, names, root)) for number, node in lines if hasattr(node, "meta")]
        if found:
            self._programs[path] = ([number for number, _ in found], [origin for _, origin in found])

    def behind(self, frame: FrameType | None) -> Origin | None:
        """The origin of the innermost frame of a program; None outside all programs."""
        while frame is not None and self._programs:
            if (program := self._programs.get(frame.f_code.co_filename)) is not None:
                at = bisect_right(program[0], frame.f_lineno) - 1
                return program[1][at] if at >= 0 else None
            frame = frame.f_back
        return None


def within(module: str, origin: Origin) -> str:
    """The full name of an origin's module; ``module`` is the compiled one.

    >>> within("layers.3", Origin("mlp", "", "")), within("", Origin("layers.0", "", "")), within("head", Origin("", "", ""))
    ('layers.3.mlp', 'layers.0', 'head')
    """
    return ".".join(part for part in (module, origin.module) if part)


def inside(module: str, root: str) -> str:
    """A module's name within the compiled one; empty outside it. Equal layers share one graph, so numbers may differ.

    >>> inside("layers.0.mlp", "layers.0"), inside("layers.0.mlp", "layers.5"), inside("head", ""), inside("head", "layers.5")
    ('mlp', 'mlp', 'head', '')
    """
    parts, outer = (name.split(".") if name else [] for name in (module, root))
    alike = all(one == other or (one.isdecimal() and other.isdecimal()) for one, other in zip(parts, outer, strict=False))
    return ".".join(parts[len(outer) :]) if alike else ""


def _origin(node: Any, names: Mapping[int, str], root: str) -> Origin:  # noqa: ANN401  a node of torch.fx
    stack: dict[str, object] = next((node.meta[name] for name in _STACKS if node.meta.get(name)), {})
    whole = next((name for key in reversed(stack) if (name := _name(key, names)) is not None), root)
    return Origin(inside(whole, root), _line(node.stack_trace or ""), str(node.target))


def _name(key: str, names: Mapping[int, str]) -> str | None:
    """The name of a module by dynamo's key: its ``id``, with a number for repeated calls."""
    identity = key.partition("@")[0]
    return names.get(int(identity)) if identity.isdecimal() else None


def _line(stack: str) -> str:
    frames = _FRAME.findall(stack)
    lines = (user_line(file, int(number)) for file, number in reversed(frames))
    return next((line for line in lines if line), "")
