"""Removes the current folder from the import path, so that zeroplan never runs Python files that happen to be there.

``python -m`` and an empty part of ``PYTHONPATH`` put the current folder first on the path. zeroplan's programs remove it before
they import anything else, and start child processes without it. This file imports only modules that Python has already loaded.
"""

import os
import sys


def leave_out_current_folder() -> None:
    """Remove the current folder from ``sys.path``, also for child processes, unless ``PYTHONPATH`` names it."""
    try:
        here = os.getcwd()  # noqa: PTH109  pathlib is not loaded yet
    except OSError:  # the folder was deleted, so nothing can be imported from it
        return
    if not sys.flags.safe_path and sys.path[:1] == [here]:
        del sys.path[0]
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if len(parts) > 1 and "" in parts and here not in parts:
        sys.path[:] = [part for part in sys.path if part not in ("", here)]
    os.environ["PYTHONSAFEPATH"] = "1"


def environment() -> dict[str, str]:
    """The environment for a child Python that must find zeroplan and must not import from the current folder.

    >>> environment()["PYTHONSAFEPATH"]
    '1'
    """
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120  as above
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = os.pathsep.join(parts if home in parts else [*parts, home])
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
