"""Provides doubles of GPU packages, but only if the script itself imports them.

transformers uses apex's norms in T5 if apex is installed, and Megatron-LM uses Transformer Engine. A dry run does not know whether
the GPU machine has these packages, unless the script imports one.
"""

import importlib.machinery
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType

FOLDER = Path(__file__).parent / "doubles_on_request"
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {str(Path(__file__).parent)})
_CHECKED_OUT = ("megatron",)
"""Packages that count as libraries anywhere: Megatron-LM runs from a checkout."""
_IMPORTING = ("<frozen importlib", importlib.__file__ or "<frozen importlib")


class OnRequest:
    """Finds a double if the package is not installed and no library imports it."""

    def __init__(self) -> None:
        self._names = {path.name for path in FOLDER.iterdir() if (path / "__init__.py").exists()}

    def find_spec(self, fullname: str, *_: Sequence[str] | ModuleType | None) -> ModuleSpec | None:
        """The spec of a double, as Python's import needs it."""
        if fullname not in self._names or _is_a_library(sys._getframe(1)):
            return None
        return PathFinder.find_spec(fullname, [str(FOLDER)])


def _is_a_library(frame: FrameType | None) -> bool:
    """Whether the importing code belongs to an installed package or to Python; frames of the import itself are skipped."""
    while frame is not None and frame.f_code.co_filename.startswith(_IMPORTING):
        frame = frame.f_back
    if frame is None:
        return True
    if str(frame.f_globals.get("__name__")).partition(".")[0] in _CHECKED_OUT:
        return True
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file
