"""Replaces functions of a library as soon as the library is imported."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Patch = Callable[[ModuleType], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after the module's import, or at once if it is imported already.

    Looking a library up with ``find_spec`` imports nothing, so it calls nothing.
    """

    def __init__(self, *patches: dict[str, Patch]) -> None:
        self._patches: dict[str, list[Patch]] = {}
        for name, patch in (one for some in patches for one in some.items()):
            self._patches.setdefault(name, []).append(patch)
        self._looking = False

    def install(self) -> None:
        """Begin to watch imports."""
        for name, patches in self._patches.items():
            for patch in patches if name in sys.modules else ():
                patch(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        """Find a module as Python does, and patch it after its own code has run."""
        if fullname not in self._patches or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec
        run, patches = spec.loader.exec_module, self._patches[fullname]

        def exec_module(module: ModuleType) -> None:
            run(module)
            for patch in patches:
                patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
