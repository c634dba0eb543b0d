"""Writes files completely or not at all: under a temporary name in the same folder, then renamed.

Everything that zeroplan leaves for a user is written here, apart from results that are appended to. A failure, a full disk say,
leaves what was there before as it was, and nothing else. Nothing that is there is written over unless that is requested.
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
    """A new empty file beside ``path``, to be filled and put there; where it is not, it is gone afterwards.

    Folders that are missing are made. Raises OSError where there can be no such file.
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
    """Reports errors of the temporary name under the file's own name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def put(beside: Path, path: Path, *, force: bool) -> None:
    """Flush an unfinished file to the disk and give it its name; ``force`` over what is there, or else FileExistsError."""
    with beside.open("rb+") as file:
        os.fsync(file.fileno())
    if force:
        _replace(beside, _meant(path))
        return
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    try:
        path.hardlink_to(beside)  # which, unlike a rename, never replaces what somebody else has put there since
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
    """Where a link leads: the file is replaced, the link stays."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


@contextmanager
def whole(path: Path, *, force: bool) -> Iterator[Path]:
    """A new file to be filled, which gets its own name if the block ends without an error. Raises as :func:`write_whole` does."""
    with unfinished(path) as beside, _errors_of(path):
        yield beside
        put(beside, path, force=force)


def write_whole(path: Path, content: str | bytes, *, force: bool) -> None:
    """Write one file. Raises FileExistsError where something is there already and ``force`` is not given, OSError otherwise."""
    write_all({path: content}, force=force)


def write_all(contents: Mapping[Path, str | bytes], *, force: bool) -> None:
    """Write several files, all of them in full before the first has its name. Raises as :func:`write_whole` does."""
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


# Before anything is computed


def refuse_target(path: Path, flag: str, *, force: bool, new_folder: bool = False) -> None:
    """Refuse a file that could not be written in the end, in one line that names the flag; SpecError.

    ``new_folder`` says that its folder may be missing, and is then made.
    """
    try:
        there, file, folder = _is_there(path), path.is_file() or not path.exists(), path.parent.is_dir()
    except (OSError, ValueError) as error:  # a name too long, or with a NUL
        raise SpecError(f"{flag} {str(path)!r} cannot be written: {reason(error)}; name another file") from None
    if not file:
        raise SpecError(f"{flag} {str(path)!r} is there and is not a file; name another")
    if there and not force:
        raise SpecError(f"{flag} {str(path)!r} is there already; name another file, or replace it with --force")
    if not folder and not new_folder:
        raise SpecError(f"{flag} {str(path)!r} is in a folder that is not there; make it first")
    refuse_folder(path.parent, flag)


def refuse_folder(folder: Path, flag: str) -> None:
    """Refuse a folder in which no file can be made, or that itself cannot be; SpecError. Nothing of it is left."""
    try:
        there = next(one for one in (folder, *folder.parents) if _is_there(one))
        with unfinished(there / "any"):
            pass
    except (OSError, ValueError) as error:
        raise SpecError(f"{flag} {str(folder)!r} cannot be written to: {reason(error)}; name another") from None


def _is_there(path: Path) -> bool:
    """Whether something has this name, a link that leads nowhere too; OSError or ValueError where nothing can have it."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def reason(error: OSError | ValueError) -> str:
    """Why a file cannot be written, in the system's words."""
    return getattr(error, "strerror", None) or str(error)


def unwritten(error: OSError) -> SpecError:
    """The message for a user about an error of this module."""
    if isinstance(error, FileExistsError):
        return SpecError(f"{error.filename!r} is there already; --force writes over it")
    return SpecError(f"{error.filename!r} cannot be written: {reason(error)}")
