"""Lets a script save, move, copy and delete checkpoints without changing the user's files.

A script often saves to a temporary name and then moves the file into place (``os.replace``). In a dry run that file does not
exist: only its name moves, and older files in its place stay. If the script opens an older file for writing, it writes to the
run's temporary folder. That folder also has a stand-in for each saved file: of the same size, with everything except tensor
values. The script reads the stand-in under the name to which it saved.
"""

import builtins
import errno
import io
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from zeroplan.dryrun.listing import lists, scans
from zeroplan.dryrun.replacements import note
from zeroplan.dryrun.without_bytes import Write, write_pickle
from zeroplan.errors import SpecError
from zeroplan.verify.replaced import put

_LARGEST_BUFFER = 1 << 28
"""Saving to a buffer in host memory writes zeros up to this size. [bytes]"""


class _Saved(NamedTuple):
    """The stand-in for a saved file: of the same size, readable unless its content could not be written."""

    file: str
    can_be_read: bool = True


class Unwritten:
    """Names of files saved without being written, and of older files that the script believes deleted.

    ``saves_now`` returns whether the script is saving; outside saving it may delete older files. ``aside`` is a folder, made
    on demand, for data that the script writes over them.
    """

    def __init__(self, saves_now: Callable[[], bool], aside: Path) -> None:
        self._saves_now, self._aside, self._began = saves_now, aside, time.time()
        self._saved: dict[str, _Saved] = {}
        self._kept: set[str] = set()
        self._stat, self._scan, self._remove = os.stat, os.scandir, os.remove
        self._made = 0
        self._elsewhere: dict[str, str] = {}
        """The new places of older files that the script overwrites."""

    def watch(self) -> None:
        """Replace the functions that move, copy and delete files, for the rest of the process."""
        opens = self._opens(io.open)
        put(builtins, open=opens)
        put(io, open=opens)
        put(os, stat=self._states(os.stat), lstat=self._states(os.lstat))
        put(os, listdir=lists(os.listdir, self._names_in), scandir=scans(os.scandir, self._names_in))
        put(os, remove=self._deletes(os.remove), unlink=self._deletes(os.unlink))
        put(shutil, rmtree=self._deletes(shutil.rmtree))
        put(os, rename=self._moves(os.rename), replace=self._moves(os.replace))
        put(os, link=self._copies(os.link), symlink=self._makes(os.symlink, 1), mkdir=self._makes(os.mkdir, 0))
        put(shutil, copyfile=self._copies(shutil.copyfile), copy=self._copies(shutil.copy), copy2=self._copies(shutil.copy2))
        put(shutil, copytree=_copies_by(shutil.copytree))

    def saves(self, save: Callable[..., object], *, name: str = "f", write: Write) -> Callable[..., object]:
        """Wrap a saving function that now writes nothing; its second argument counts as saved if it is a path.

        ``write`` writes everything except tensor values.
        """

        @wraps(save)
        def saved(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401
            target = args[1] if len(args) > 1 else kwargs.get(name)
            rest = {key: value for key, value in kwargs.items() if key != name}
            what = args[0] if args else rest.pop(next(iter(rest)))
            if isinstance(target, io.BytesIO):
                _fill(target, what)
            elif (path := self._path_of(target)) is not None:
                stand_in = self._stand_in_file(path, what, lambda file: write(what, file, *args[2:], **rest))
                self._count_as_saved(path, stand_in, opened=_absolute(target) is None)
            return save(*args, **kwargs)

        return saved

    def saves_folder(self, save: Callable[..., object], *files: str) -> Callable[..., object]:
        """Wrap a function that saves a folder: it makes the folder and counts ``files`` in it as saved and unreadable."""

        @wraps(save)
        def saved(*args: object, **kwargs: Any) -> object:  # noqa: ANN401
            if (folder := _folder_of(kwargs, "storage_writer")) is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
                for file in files:
                    Path(stand_in := self._new_file(file)).touch()
                    self._count_as_saved(str(Path(folder) / file), _Saved(stand_in, can_be_read=False))
            return save(*args, **kwargs)

        return saved

    def has_saved(self, path: "str | Path") -> bool:
        """Whether a file was saved in this run without being written."""
        whole = _absolute(path)
        return whole is not None and self._is_unwritten(whole)

    def loads(self, load: Callable[..., object]) -> Callable[..., object]:
        """Wrap ``torch.load`` to read this run's stand-ins; with ``mmap`` it passes the file's name to C++."""

        @wraps(load)
        def loaded(f: object, *args: object, **kwargs: object) -> object:
            path = _absolute(f)
            return load(f if path is None or not self._is_unwritten(path) else self._readable(path), *args, **kwargs)

        return loaded

    def _path_of(self, target: object) -> str | None:
        """The absolute path of a save's target; None for an open file that has content already."""
        path = _absolute(target)
        name, flush = (getattr(target, word, None) for word in ("name", "flush"))
        if path is not None or not isinstance(name, str) or not callable(flush):
            return path
        back = {elsewhere: path for path, elsewhere in self._elsewhere.items()}
        flush()
        return None if self._size(name) else back.get(name, str(Path(name).absolute()))

    def _new_file(self, path: str) -> str:
        """The path of a new file of the same name in our folder."""
        self._made += 1
        folder = self._aside / str(self._made)
        folder.mkdir(parents=True)
        return str(folder / Path(path).name)

    def _stand_in_file(self, path: str, what: object, write: Callable[[str], None]) -> _Saved:
        """Write the stand-in for a saved file; if that fails, an unreadable file as large as its tensors."""
        file = self._new_file(path)
        try:
            write(file)
        except Exception:  # noqa: BLE001  an error is raised only if the script reads the file again
            with Path(file).open("wb") as out:
                out.truncate(_bytes_saved(what))
            return _Saved(file, can_be_read=False)
        return _Saved(file)

    def _count_as_saved(self, path: str, saved: _Saved, *, opened: bool = False) -> None:
        """Count a file as saved. Unless it is open, delete the file that the script wrote there in this run."""
        if not opened:
            self._remove_new(path)
        self._elsewhere.pop(path, None)
        self._saved[path] = saved

    def _remove_new(self, path: str) -> None:
        if self._is_there(path) and not self._is_older(path):
            self._remove(path)

    def _readable(self, path: str) -> str:
        """The stand-in for a saved file. Raises SpecError if it cannot be read."""
        saved = self._saved[path]
        if not saved.can_be_read:
            raise SpecError(
                f"{path} was saved in this run, and a dry run could not keep its contents; do not read it back, or read a "
                f"checkpoint from before the run"
            )
        note("reading of saved files", "names, shapes and dtypes are those that were saved; no numbers are in them")
        return saved.file

    def _names_in(self, folder: object) -> list[str]:
        """The names of saved files in a folder that do not exist on disk."""
        whole = None if isinstance(folder, bytes) else _absolute("." if folder is None else folder)
        return [] if whole is None else [
            Path(path).name for path in self._saved if str(Path(path).parent) == whole and not self._is_there(path)
        ]  # fmt: skip

    def _states(self, state: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        """Let ``os.stat``, and with it ``exists``, ``getsize`` and ``pathlib``, see saved files."""

        @wraps(state)
        def stated(path: object, *args: Any, **kwargs: Any) -> os.stat_result:  # noqa: ANN401
            whole = _absolute(path, **kwargs) if self._saved else None
            if whole is None or not self._is_unwritten(whole):
                return state(path, *args, **kwargs)
            return self._stat(self._saved[whole].file)

        return stated

    def _opens(self, opened: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(opened)
        def opens(file: object, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self._saved or self._elsewhere or "w" in mode or "a" in mode:
                file = self._opened_instead(file, mode)
            return opened(file, mode, *args, **kwargs)

        return opens

    def _opened_instead(self, file: object, mode: str) -> object:
        """The file to open instead: a saved file's stand-in, or a copy of an older file for writing."""
        path = _absolute(file)
        if path is None:
            return file
        if self._is_unwritten(path):
            if "x" in mode:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            if "w" not in mode:
                return self._readable(path)
            del self._saved[path]
        adds, anew = "a" in mode, "w" in mode
        if (adds or anew) and path not in self._elsewhere and self._is_there(path) and self._is_older(path):
            elsewhere = self._new_file(path)
            if adds:
                shutil.copyfile(path, elsewhere)
            self._elsewhere[path] = elsewhere
            note("writing over files from before this run", "they stay; new contents go to temporary files")
        return self._elsewhere.get(path, file)

    def _deletes(self, delete: Callable[..., None]) -> Callable[..., None]:
        @wraps(delete)
        def deleted(path: object, *args: object, **kwargs: object) -> None:
            whole = _absolute(path, **kwargs)
            if whole is None:
                delete(path, *args, **kwargs)
            elif self._is_unwritten(whole):
                self._saved.pop(whole)
                self._remove_new(whole)
            elif self._keeps_older(whole):
                self._kept.add(whole)
            else:
                for inside in self._within(whole):
                    self._saved.pop(inside)
                delete(path, *args, **kwargs)

        return deleted

    def _moves(self, move: Callable[..., None]) -> Callable[..., None]:
        @wraps(move)
        def moved(source: object, target: object, **kwargs: object) -> None:
            here, there = _absolute(source, **kwargs), _absolute(target, **kwargs)
            if here is None or there is None:
                move(source, target, **kwargs)
                return
            if self._is_unwritten(here) or self._keeps_older(here) or there in self._kept:
                unwritten = self._is_unwritten(here)
                self._count_as_saved(there, self._saved.pop(here) if unwritten else _Saved(here))
                if unwritten:
                    self._remove_new(here)
                note("moving of saved files", "their names move, and files from before this run stay")
            else:
                move(source, target, **kwargs)
            for path in self._within(here):
                self._saved[there + path[len(here) :]] = self._saved.pop(path)

        return moved

    def _copies(self, copy: Callable[..., object]) -> Callable[..., object]:
        @wraps(copy)
        def copied(source: object, target: object, *args: object, **kwargs: object) -> object:
            here, there = _absolute(source, **kwargs), _absolute(target, **kwargs)
            if here is None or there is None or not self._is_unwritten(here):
                return copy(source, target, *args, **kwargs)
            into_folder = Path(there).is_dir()
            self._count_as_saved(str(Path(there, Path(here).name)) if into_folder else there, self._saved[here])
            note("copying of saved files", "nothing is written")
            return target

        return copied

    def _makes(self, make: Callable[..., None], at: int) -> Callable[..., None]:
        """Skip making a folder or link if an older one stays in its place."""

        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            target = _absolute(args[at], **kwargs) if len(args) > at else None
            if target is None or target not in self._kept:
                make(*args, **kwargs)

        return made

    def _keeps_older(self, path: str) -> bool:
        """Whether the script is saving and the path, or a file in it, is older than the run; such files stay."""
        if not self._saves_now() or not self._is_older(path):
            return False
        note("deleting of older checkpoints", "files from before this run stay")
        return True

    def _is_unwritten(self, path: str) -> bool:
        """Whether a path was saved and not written since. A file that the script opened for saving exists but is empty."""
        return path in self._saved and (not self._is_there(path) or not self._size(path) or self._is_older(path))

    def _is_there(self, path: str, kind: Callable[[int], bool] = stat.S_ISREG) -> bool:
        """Whether a file, or something of another kind, exists on disk."""
        with suppress(OSError):
            return kind(self._stat(path).st_mode)
        return False

    def _size(self, path: str) -> int:
        with suppress(OSError):
            return self._stat(path).st_size
        return 0

    def _is_older(self, path: str) -> bool:
        """Whether a file, or any file in a folder, is older than the run."""
        return any(self._stat(file).st_mtime < self._began for file in self._files(path) if self._is_there(file))

    def _files(self, path: str) -> Iterator[str]:
        if not self._is_there(path, stat.S_ISDIR):
            yield path
            return
        with self._scan(path) as entries:
            for entry in entries:
                yield from self._files(entry.path) if entry.is_dir(follow_symlinks=False) else (entry.path,)

    def _within(self, folder: str) -> list[str]:
        return [path for path in self._saved if path.startswith(folder + os.sep)]


def _bytes_saved(what: object) -> int:
    """The size of saved tensors, each storage once. [bytes]"""
    held = what.state_dict() if isinstance(what, torch.nn.Module) else what
    storages = {
        one.untyped_storage()._cdata: one.untyped_storage() for one in tree_leaves(held) if isinstance(one, torch.Tensor)
    }
    return sum(one.nbytes() for one in storages.values())


def _fill(buffer: io.BytesIO, what: object) -> None:
    """Write a pickle without tensor values into a host buffer, unless it is large."""
    if _bytes_saved(what) <= _LARGEST_BUFFER:
        with suppress(Exception):  # if pickling fails, the buffer stays empty
            write_pickle(what, buffer)


def _folder_of(options: dict[str, Any], through: str) -> str | None:
    """The folder of a distributed checkpoint: its name, or that of its reader or writer."""
    given = options.get("checkpoint_id") or getattr(options.get(through), "path", None)
    return None if given is None or "://" in str(given) else _absolute(given)


def folder_read(options: dict[str, Any]) -> str | None:
    """The folder that ``torch.distributed.checkpoint.load`` reads."""
    return _folder_of(options, "storage_reader")


def _copies_by(copytree: Callable[..., object]) -> Callable[..., object]:
    """``shutil.copytree`` with the current ``shutil.copy2`` as its copy function."""

    @wraps(copytree)
    def copied(*args: object, **kwargs: object) -> object:
        if len(args) < 5:  # the function is the fifth argument
            kwargs.setdefault("copy_function", shutil.copy2)
        return copytree(*args, **kwargs)

    return copied


def _absolute(path: object, **options: object) -> str | None:
    """The absolute path; None for an open file, or for a name relative to a folder's descriptor."""
    relative = any(value is not None for name, value in options.items() if name.endswith("dir_fd"))
    if relative or not isinstance(path, str | bytes | os.PathLike):
        return None
    return str(Path(os.fsdecode(path)).absolute())
