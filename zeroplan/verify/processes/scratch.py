"""A run's own folder, beside the system's temporary files; what a killed run left there is removed by the next.

Whoever made a folder holds a lock on it for as long as it lives, and the system lets go of the locks of the dead: what nobody
holds is nobody's.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroplan.verify.failures import NotHereError

_NEW, _HELD = "zeroplan-new-", "zeroplan-run-"
#: What stands in each from the beginning: a folder without it was made by somebody else.
ORDER = "task.json"


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, gone afterwards. Raises NotHereError where none can be made."""
    try:
        folder, held = _made()
    except OSError as error:
        raise no_place(error) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def no_place(error: OSError) -> NotHereError:
    """What is said where nothing can be written down for a run."""
    return NotHereError(f"there is no place for temporary files: {error.strerror}; make room, or set TMPDIR to another folder")


def _made() -> tuple[Path, int]:
    """A folder and the descriptor that holds it: held before it has the name by which others look for it."""
    folder = Path(tempfile.mkdtemp(prefix=_NEW))
    held = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # without locks, as some network file systems are, nobody can take one either
        _lock(held)
    return folder.rename(folder.with_name(folder.name.replace(_NEW, _HELD))), held


def _lock(descriptor: int) -> None:
    import fcntl  # noqa: PLC0415  Windows has none

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def swept() -> str:
    """Remove what killed runs left, and say how many folders that were; empty where there were none."""
    try:
        found = sorted(Path(tempfile.gettempdir()).glob(f"{_HELD}*"))
    except OSError:
        return ""
    removed = sum(map(_removed, found))
    what = "folder" if removed == 1 else "folders"
    return f"{removed} {what} of killed runs removed from {tempfile.gettempdir()}" if removed else ""


def _removed(folder: Path) -> bool:
    """Whether it was left by a run of this user's that is no more, and is gone now."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(held).st_uid != os.geteuid() or not (folder / ORDER).is_file():
            return False
        _lock(held)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # somebody holds it
        return False
    finally:
        os.close(held)
    return not folder.exists()
