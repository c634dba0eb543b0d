"""A run's own folder among the system's temporary files; each run removes those of killed runs.

A run holds a lock on its folder. The system releases the locks of dead processes, so an unlocked folder belongs to no run.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroplan.verify.failures import NotHereError

_NEW, _HELD = "zeroplan-new-", "zeroplan-run-"
#: A file in every folder from the beginning; a folder without it belongs to another program.
ORDER = "task.json"


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new folder and remove it afterwards. Raises NotHereError if none can be made."""
    try:
        folder, held = _made()
    except OSError as error:
        raise no_temporary_folder(error) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def no_temporary_folder(error: OSError) -> NotHereError:
    """The error if a run's temporary files cannot be written."""
    return NotHereError(
        f"temporary files cannot be written: {error.strerror}; free disk space, or set TMPDIR to another folder"
    )


def _made() -> tuple[Path, int]:
    """A folder and the descriptor of its lock. It is locked before it gets the name that other runs look for."""
    folder = Path(tempfile.mkdtemp(prefix=_NEW))
    held = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # some network file systems have no locks for anybody
        _lock(held)
    return folder.rename(folder.with_name(folder.name.replace(_NEW, _HELD))), held


def _lock(descriptor: int) -> None:
    import fcntl  # noqa: PLC0415  Windows has none

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_leftovers() -> str:
    """Remove the folders of killed runs, and report how many; empty without any."""
    try:
        found = sorted(Path(tempfile.gettempdir()).glob(f"{_HELD}*"))
    except OSError:
        return ""
    removed = sum(map(_removed, found))
    what = "folder" if removed == 1 else "folders"
    return f"{removed} {what} of killed runs removed from {tempfile.gettempdir()}" if removed else ""


def _removed(folder: Path) -> bool:
    """Whether the folder belonged to a dead run of this user and has been removed."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(held).st_uid != os.geteuid() or not (folder / ORDER).is_file():
            return False
        _lock(held)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # another process holds the lock
        return False
    finally:
        os.close(held)
    return not folder.exists()
