"""Writes files completely or not at all: under a temporary name in the same folder, then renamed.

All of zeroplan's output files go through this module, except results that are appended to. A failure, such as a full disk, leaves
the existing file unchanged and no partial file. Existing files are overwritten only on request.
"""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from zeroplan.errors import SpecError


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yield a new empty file in the folder of ``path``, to be filled and renamed with :func:`put`. Otherwise it is deleted.

    Missing folders are created. Raises OSError if the file cannot be created.
    """
    folder = _meant(path).parent
    beside = folder / f".{os.urandom(8).hex()}.unfinished"
    with _errors_of(path):
        _make(folder)
        os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield beside
    finally:
        beside.unlink(missing_ok=True)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Raise errors about the temporary file with the final file's name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def put(beside: Path, path: Path, *, force: bool) -> None:
    """Flush an unfinished file to disk and rename it to ``path``. Raises FileExistsError if ``path`` exists, unless ``force``."""
    with beside.open("rb+") as file:
        os.fsync(file.fileno())
    if force:
        _replace(beside, _meant(path))
        return
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    try:
        path.hardlink_to(beside)  # unlike a rename, a link never replaces a file that another process has just created
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        beside.replace(path)


def _replace(beside: Path, path: Path) -> None:
    if path.exists():
        if not path.is_file():  # a folder, a device
            raise OSError(errno.EINVAL, "it is there and is not a file")
        beside.chmod(path.stat().st_mode & 0o777)
    beside.replace(path)


def _meant(path: Path) -> Path:
    """The target of a symbolic link: the target is replaced, the link stays."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


@contextmanager
def whole(path: Path, *, force: bool) -> Iterator[Path]:
    """Yield a new file to be filled; it gets its final name if the block ends without an error. Raises like :func:`write_whole`."""
    with unfinished(path) as beside, _errors_of(path):
        yield beside
        put(beside, path, force=force)


def write_whole(path: Path, content: str | bytes, *, force: bool) -> None:
    """Write one file. Raises FileExistsError if it exists, unless ``force``, and OSError for other failures."""
    write_all({path: content}, force=force)


def write_all(contents: Mapping[Path, str | bytes], *, force: bool) -> None:
    """Write several files; all are complete before the first gets its final name. Raises like :func:`write_whole`."""
    with ExitStack() as stack:
        made = [(stack.enter_context(unfinished(path)), path) for path in contents]
        for (beside, path), content in zip(made, contents.values(), strict=True):
            with _errors_of(path):
                beside.write_bytes(content.encode() if isinstance(content, str) else content)
                if os.path.lexists(path) and not force:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        for beside, path in made:
            with _errors_of(path):
                put(beside, path, force=force)


def put_numbered(beside: Path, folder: Path, stem: str, ending: str) -> Path:
    """Give an unfinished file the first free name: ``stem.ending``, or ``stem-2.ending`` and so on. Returns its path."""
    for number in count(1):
        path = folder / f"{stem}{'' if number == 1 else f'-{number}'}{ending}"
        try:
            put(beside, path, force=False)
        except FileExistsError:
            continue
        return path
    raise AssertionError("count ends")


# Checks before the computation


def refuse_target(path: Path, flag: str, *, force: bool, new_folder: bool = False) -> None:
    """Raise SpecError, in one line with the flag, for an output file that could not be written.

    ``new_folder``: its folder may be missing and will be created.
    """
    try:
        there, file, folder = _is_there(path), path.is_file() or not path.exists(), path.parent.is_dir()
    except (OSError, ValueError) as error:  # the name is too long or contains a NUL
        raise SpecError(f"{flag} {str(path)!r} cannot be written: {reason(error)}; name another file") from None
    if not file:
        raise SpecError(f"{flag} {str(path)!r} is there and is not a file; name another")
    if there and not force:
        raise SpecError(f"{flag} {str(path)!r} is there already; name another file, or replace it with --force")
    if not folder and not new_folder:
        raise SpecError(f"{flag} {str(path)!r} is in a folder that is not there; make it first")
    refuse_folder(path.parent, flag)


def refuse_folder(folder: Path, flag: str) -> None:
    """Raise SpecError for a folder that cannot be created or written to. The test file is deleted."""
    try:
        there = next(one for one in (folder, *folder.parents) if _is_there(one))
        with unfinished(there / "any"):
            pass
    except (OSError, ValueError) as error:
        raise SpecError(f"{flag} {str(folder)!r} cannot be written to: {reason(error)}; name another") from None


def _is_there(path: Path) -> bool:
    """Whether the name exists, as a broken link too; raises OSError or ValueError for an impossible name."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def reason(error: OSError | ValueError) -> str:
    """The operating system's message for the failure."""
    return getattr(error, "strerror", None) or str(error)


def unwritten(error: OSError) -> SpecError:
    """The user's message for an error of this module."""
    if isinstance(error, FileExistsError):
        return SpecError(f"{error.filename!r} is there already; --force writes over it")
    return SpecError(f"{error.filename!r} cannot be written: {reason(error)}")
