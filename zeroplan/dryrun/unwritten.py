"""Files that a script believes it has saved, and files from before the run: both are moved, copied and deleted by name alone.

A script often saves to a temporary name and then moves that file to its place (``os.replace``). A dry run has written no such
file. Its name moves, and whatever the script had there before the run stays. A file from before the run that the script opens to
write it anew is written elsewhere, in a folder that goes with the run.
"""

import builtins
import io
import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zeroplan.dryrun.stood_in import note
from zeroplan.verify.replaced import put


class Unwritten:
    """The names of files that were saved without being written, and of older files that the script believes to be gone.

    ``saves_now`` returns whether the script is saving: only then do older files stay where they are. ``aside`` is a folder, made
    when it is needed, for what the script writes over them.
    """

    def __init__(self, saves_now: Callable[[], bool], aside: Path) -> None:
        self._saves_now, self._aside, self._began = saves_now, aside, time.time()
        self._saved: dict[str, int] = {}
        """The bytes that each would have."""
        self._kept: set[str] = set()
        self._stat = os.stat
        self._elsewhere: dict[str, str] = {}
        """Where files from before the run are written anew."""

    def watch(self) -> None:
        """Replace the functions that move, copy and delete files, to the end of the process."""
        opens = self._opens(io.open)
        put(builtins, open=opens)
        put(io, open=opens)
        put(os, stat=self._states(os.stat))
        put(os, remove=self._deletes(os.remove), unlink=self._deletes(os.unlink))
        put(shutil, rmtree=self._deletes(shutil.rmtree))
        put(os, rename=self._moves(os.rename), replace=self._moves(os.replace))
        put(os, link=self._copies(os.link), symlink=self._makes(os.symlink, 1), mkdir=self._makes(os.mkdir, 0))
        put(shutil, copyfile=self._copies(shutil.copyfile), copy=self._copies(shutil.copy), copy2=self._copies(shutil.copy2))

    def saves(self, save: Callable[..., object], *, at: int = 1, name: str = "f") -> Callable[..., object]:
        """Return a function that saves nothing; its target, an argument by place or name, counts as saved where it is a path."""

        @wraps(save)
        def saved(*args: object, **kwargs: object) -> object:
            target = args[at] if len(args) > at else kwargs.get(name)
            if (path := _whole(target)) is not None:
                self._saved[path] = _bytes_saved(args[0] if args else next(iter(kwargs.values())))
            return save(*args, **kwargs)

        return saved

    def _states(self, state: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        """Files that were saved are there, as ``os.path.exists`` and ``getsize`` and ``pathlib`` see them."""

        @wraps(state)
        def stated(path: object, *args: Any, **kwargs: Any) -> os.stat_result:  # noqa: ANN401
            try:
                return state(path, *args, **kwargs)
            except FileNotFoundError:
                whole = _whole(path, **kwargs)
                if whole is None or whole not in self._saved:
                    raise
                note("sizes of saved files", "the bytes of the tensors that would be in them")
                now = int(time.time())
                return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, self._saved[whole], now, now, now))

        self._stat = state
        return stated

    def _opens(self, opened: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(opened)
        def opens(file: object, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self._elsewhere or "w" in mode:
                file = self._elsewhere_where_older(file, mode)
            return opened(file, mode, *args, **kwargs)

        return opens

    def _elsewhere_where_older(self, file: object, mode: str) -> object:
        """Return the file that a script gets, which empties none from before the run."""
        path = _whole(file)
        if path is None:
            return file
        if "w" in mode and path not in self._elsewhere and Path(path).is_file() and self._is_older(path):
            self._aside.mkdir(exist_ok=True)
            self._elsewhere[path] = str(self._aside / str(len(self._elsewhere)))
            note("writing over files from before this run", "they stay; what is written goes to temporary files")
        return self._elsewhere.get(path, file)

    def _deletes(self, delete: Callable[..., None]) -> Callable[..., None]:
        @wraps(delete)
        def deleted(path: object, *args: object, **kwargs: object) -> None:
            whole = _whole(path, **kwargs)
            if whole is None:
                delete(path, *args, **kwargs)
            elif self._is_unwritten(whole):
                self._saved.pop(whole)
            elif self._stays(whole):
                self._kept.add(whole)
            else:
                for inside in self._within(whole):
                    self._saved.pop(inside)
                delete(path, *args, **kwargs)

        return deleted

    def _moves(self, move: Callable[..., None]) -> Callable[..., None]:
        @wraps(move)
        def moved(source: object, target: object, **kwargs: object) -> None:
            here, there = _whole(source, **kwargs), _whole(target, **kwargs)
            if here is None or there is None:
                move(source, target, **kwargs)
            elif self._is_unwritten(here) or self._stays(here) or there in self._kept:
                self._saved[there] = self._saved.pop(here) if here in self._saved else self._size(here)
                note("moving of saved files", "their names move, and files from before this run stay")
            else:
                move(source, target, **kwargs)
                for path in self._within(here):
                    self._saved[there + path[len(here) :]] = self._saved.pop(path)

        return moved

    def _copies(self, copy: Callable[..., object]) -> Callable[..., object]:
        @wraps(copy)
        def copied(source: object, target: object, *args: object, **kwargs: object) -> object:
            here, there = _whole(source, **kwargs), _whole(target, **kwargs)
            if here is None or there is None or not self._is_unwritten(here):
                return copy(source, target, *args, **kwargs)
            into_folder = Path(there).is_dir()
            self._saved[str(Path(there, Path(here).name)) if into_folder else there] = self._saved[here]
            note("copying of saved files", "nothing is written")
            return target

        return copied

    def _makes(self, make: Callable[..., None], at: int) -> Callable[..., None]:
        """A folder or link is made anew where one from before the run stays."""

        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            target = _whole(args[at], **kwargs) if len(args) > at else None
            if target is None or target not in self._kept:
                make(*args, **kwargs)

        return made

    def _stays(self, path: str) -> bool:
        """Whether a path from before the run, or one that holds a file from then, stays because the script saves now."""
        if not self._saves_now() or not self._is_older(path):
            return False
        note("deleting of older checkpoints", "files from before this run stay")
        return True

    def _is_unwritten(self, path: str) -> bool:
        """Whether a path was saved, and not written since by the script itself."""
        return path in self._saved and (not self._is_there(path) or self._is_older(path))

    def _is_there(self, path: str) -> bool:
        with suppress(OSError):
            return stat.S_ISREG(self._stat(path).st_mode)
        return False

    def _size(self, path: str) -> int:
        with suppress(OSError):
            return self._stat(path).st_size
        return 0

    def _is_older(self, path: str) -> bool:
        whole = Path(path)
        files = [whole, *whole.rglob("*")] if whole.is_dir() else [whole]
        return any(file.is_file() and file.stat().st_mtime < self._began for file in files)

    def _within(self, folder: str) -> list[str]:
        return [path for path in self._saved if path.startswith(folder + os.sep)]


def _bytes_saved(what: object) -> int:
    """The bytes of the tensors that are saved, each storage once."""
    held = what.state_dict() if isinstance(what, torch.nn.Module) else what
    storages = {
        one.untyped_storage()._cdata: one.untyped_storage() for one in tree_leaves(held) if isinstance(one, torch.Tensor)
    }
    return sum(one.nbytes() for one in storages.values())


def _whole(path: object, **options: object) -> str | None:
    """An absolute path; None for an open file, or a name that is relative to a folder's descriptor."""
    relative = any(value is not None for name, value in options.items() if name.endswith("dir_fd"))
    if relative or not isinstance(path, str | bytes | os.PathLike):
        return None
    return str(Path(os.fsdecode(path)).absolute())
