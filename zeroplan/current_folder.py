"""Keeps the folder that a program is started in off its import path: what lies there by chance is not ours to run.

``python -m`` puts that folder first on the path, and so does an empty part of ``PYTHONPATH``. The programs of this package take it
off again before they import anything else, and start others without it. Nothing is imported here that Python has not loaded by
then.
"""

import os
import sys


def leave_out_current_folder() -> None:
    """Take the current folder off this process's path, unless ``PYTHONPATH`` names it. Pythons started later do not look there."""
    try:
        here = os.getcwd()  # noqa: PTH109  pathlib is not loaded yet
    except OSError:  # the folder is gone, and nothing can be imported from it
        return
    if not sys.flags.safe_path and sys.path[:1] == [here]:
        del sys.path[0]
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if len(parts) > 1 and "" in parts and here not in parts:
        sys.path[:] = [part for part in sys.path if part not in ("", here)]
    os.environ["PYTHONSAFEPATH"] = "1"


def environment() -> dict[str, str]:
    """This process's environment for a Python that must find zeroplan and not look in the current folder.

    >>> environment()["PYTHONSAFEPATH"]
    '1'
    """
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120  as above
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = os.pathsep.join(parts if home in parts else [*parts, home])
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
