"""Doubles of packages that libraries use wherever they find them: they are found where the script itself imports them.

transformers takes apex's norms in T5 as soon as apex is there, and Megatron-LM takes other ways with Transformer Engine. A dry run
does not know whether the GPU machine has these packages. A script that imports one tells it.
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
"""Packages that are libraries wherever they lie: Megatron-LM runs from a checkout."""
_IMPORTING = ("<frozen importlib", importlib.__file__ or "<frozen importlib")


class OnRequest:
    """Finds a double where the package itself was not found, for code that belongs to no library."""

    def __init__(self) -> None:
        self._names = {path.name for path in FOLDER.iterdir() if (path / "__init__.py").exists()}

    def find_spec(self, fullname: str, *_: Sequence[str] | ModuleType | None) -> ModuleSpec | None:
        """Find a double as Python finds a package."""
        if fullname not in self._names or _is_a_library(sys._getframe(1)):
            return None
        return PathFinder.find_spec(fullname, [str(FOLDER)])


def _is_a_library(frame: FrameType | None) -> bool:
    """Whether the code that imports belongs to an installed package, or to Python. Frames of the import itself do not count."""
    while frame is not None and frame.f_code.co_filename.startswith(_IMPORTING):
        frame = frame.f_back
    if frame is None:
        return True
    if str(frame.f_globals.get("__name__")).partition(".")[0] in _CHECKED_OUT:
        return True
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file
