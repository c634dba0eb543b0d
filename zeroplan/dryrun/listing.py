"""Makes ``os.listdir`` and ``os.scandir`` also list the files that a script saved without writing them."""

import os
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import chain
from typing import Any, Self


class Entry:
    """A file's entry in the result of ``os.scandir``."""

    def __init__(self, folder: str, name: str) -> None:
        self.name, self.path = name, os.path.join(folder, name)  # noqa: PTH118  as os.scandir joins them

    def __fspath__(self) -> str:
        return self.path

    def is_file(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        """True."""
        return True

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        """False."""
        return False

    is_symlink = is_junction = is_dir

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:  # noqa: ARG002
        """The result of ``os.stat``."""
        return os.stat(self.path)  # noqa: PTH116

    def inode(self) -> int:
        """The file's inode."""
        return self.stat().st_ino


class _Scan:
    """An iterator of ``os.scandir`` with further entries at the end."""

    def __init__(self, real: Any, more: list[Entry]) -> None:  # noqa: ANN401  the type of os.scandir's iterator has no name
        self.close = real.close
        self._entries: Iterator[Any] = chain(real, more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:  # noqa: ANN401
        return next(self._entries)


def lists(listed: Callable[..., list[Any]], names: Callable[[object], list[str]]) -> Callable[..., list[Any]]:
    """``os.listdir`` with further ``names`` of a folder."""

    @wraps(listed)
    def listdir(path: Any = ".") -> list[Any]:  # noqa: ANN401  a name, bytes or a descriptor
        return [*listed(path), *names(path)]

    return listdir


def scans(scanned: Callable[..., Any], names: Callable[[object], list[str]]) -> Callable[..., Any]:
    """``os.scandir`` with further ``names`` of a folder."""

    @wraps(scanned)
    def scandir(path: Any = ".") -> Any:  # noqa: ANN401
        found, more = scanned(path), names(path)
        return _Scan(found, [Entry(os.fspath(path), name) for name in more]) if more else found

    return scandir
