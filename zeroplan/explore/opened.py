"""Opens a file that a user drops on the page: a snapshot, a trace, or a saved dry run. The file is untrusted."""

import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from zeroplan.errors import SpecError
from zeroplan.explore.answers import SCHEMA_VERSION, plain, text_of
from zeroplan.units import MIB

LARGEST_BYTES = 512 * MIB
"""The largest accepted file; a snapshot of a large model's step has tens of megabytes. [bytes]"""
_LONGEST_NAME, _LONGEST_SUFFIX, _TURN_S = 120, 8, 10.0


class _BusyError(Exception):
    """Another file is being read."""


class Opening:
    """Opens one file at a time, in a thread, since a large one takes seconds. The file is deleted afterwards."""

    def __init__(self) -> None:
        self._one = threading.Lock()

    async def __call__(self, request: Request) -> Response:
        """Answer with what is alive over time in the file, which is the body of the request."""
        name = Path(request.query_params.get("name", "") or "file").name[:_LONGEST_NAME]
        with tempfile.TemporaryDirectory(prefix="zeroplan-") as folder:
            path = Path(folder) / f"file{_suffix(name)}"
            try:
                await _write(path, request.stream())
                return Response(await run_in_threadpool(self._one_at_a_time, path, name), media_type="application/json")
            except SpecError as error:
                return JSONResponse({"error": str(error).replace(repr(str(path)), repr(name))}, status_code=422)
            except OSError as error:  # a full disk
                return JSONResponse(
                    {"error": f"file {name!r} cannot be put aside for reading: {error.strerror}"}, status_code=422
                )
            except _BusyError:
                return JSONResponse({"error": "another file is being read; wait a moment"}, status_code=429)

    def _one_at_a_time(self, path: Path, name: str) -> bytes:
        if not self._one.acquire(timeout=_TURN_S):
            raise _BusyError
        try:
            return opened_bytes(path, name)
        finally:
            self._one.release()


def opened_bytes(path: Path, name: str) -> bytes:
    """Return the memory over time in a file as JSON; ``name``: its name for the user. Raises SpecError, one line."""
    from zeroplan.report.series.opened import opened  # noqa: PLC0415  most readers of the page open no file

    found = opened(path, name)
    return text_of({"schema_version": SCHEMA_VERSION, **found._asdict(), "step": plain(found.step)})


def _suffix(name: str) -> str:
    """Return the suffix of a name, which distinguishes pickles and compressed files."""
    suffix = Path(name).suffix
    return suffix if len(suffix) <= _LONGEST_SUFFIX and suffix[1:].isalnum() else ""


async def _write(path: Path, pieces: AsyncIterator[bytes]) -> None:
    written = 0
    with path.open("wb") as file:
        async for piece in pieces:
            written += len(piece)
            if written > LARGEST_BYTES:
                _too_large()
            file.write(piece)


def _too_large() -> NoReturn:
    raise SpecError(f"the file has more than {LARGEST_BYTES // MIB} MiB; `zeroplan diagnose` on the command line reads it")
