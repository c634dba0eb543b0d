"""``zeroplan explore``: a local page on which you change a job and see its memory."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import say
from zeroplan.cli.flags import Force
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.installation import not_installed

if TYPE_CHECKING:
    import socket

HOST, PORT = "127.0.0.1", 8642


def explore_command(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A saved run (`zeroplan dryrun --save`) to open first.")
    ] = None,
    *,
    port: Annotated[
        str, typer.Option("--port", metavar="N", help="The port of the page; 0 chooses a free one.", show_default=True)
    ] = str(PORT),
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in your browser.")] = True,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="Write the page for a web server instead; needs --pyodide."),
    ] = None,
    pyodide: Annotated[
        str | None,
        typer.Option("--pyodide", metavar="FOLDER", help="The unpacked npm package of Pyodide, which computes in the browser."),
    ] = None,
    force: Force = False,
) -> None:
    """Open a page in your browser: change the job, and see its memory by ZeRO stage and over a step."""
    if out is not None or pyodide is not None:
        _write(out, pyodide, run, force=force)
        return
    if lacking := not_installed("fastapi", "uvicorn", by="the page"):
        raise MeasurementError(lacking)
    page = None if run is None else _page_of(run)
    listening = _listening(_port(port))
    address = f"http://{HOST}:{listening.getsockname()[1]}/{'' if page is None else 'run'}"
    say(f"{address} (Ctrl-C ends it)")
    if browser:
        import webbrowser  # noqa: PLC0415  start-up is part of every command's time

        webbrowser.open(address)
    _serve(listening, page)


def _write(out: str | None, pyodide: str | None, run: str | None, *, force: bool) -> None:
    from zeroplan.explore.site import write_site  # noqa: PLC0415  start-up is part of every command's time

    if out is None or pyodide is None or run is not None:
        raise SpecError("--out and --pyodide belong together, without a saved run: --out site --pyodide package")
    write_site(Path(out), Path(pyodide), force=force)
    say(f"wrote {out}; see it with: python -m http.server --directory {shlex.quote(out)}")


def _page_of(run: str) -> bytes:
    """Return the page of a saved run, built before the server starts."""
    from zeroplan.explore.saved_run import run_page  # noqa: PLC0415  start-up is part of every command's time
    from zeroplan.saved_runs.files import read_saved  # noqa: PLC0415

    return run_page(read_saved(Path(run)))


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise SpecError(f"--port {text!r} is no port; write one from 1024 to 65535, or 0 for a free one")
    return int(text)


def _listening(port: int) -> "socket.socket":
    import socket  # noqa: PLC0415  start-up is part of every command's time

    # With an explicit TCP protocol, asyncio sets TCP_NODELAY. Otherwise each small answer waits 40 ms for an acknowledgement.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen()  # from now on a browser that is faster than the server waits instead of failing
    except OSError as error:
        listening.close()
        raise MeasurementError(f"port {port} cannot be used: {error.strerror}; --port 0 chooses a free one") from None
    return listening


def _serve(listening: "socket.socket", run: bytes | None) -> None:
    import uvicorn  # noqa: PLC0415  only this command needs it

    from zeroplan.explore.connection import TimedConnection  # noqa: PLC0415
    from zeroplan.explore.server import LONGEST_QUERY, explore_app  # noqa: PLC0415

    # uvicorn's h11 parser, unlike httptools, limits how much it reads of a request.
    config = uvicorn.Config(
        explore_app(run), log_level="warning", lifespan="off", access_log=False, server_header=False, timeout_keep_alive=5,
        limit_concurrency=256, http=TimedConnection, h11_max_incomplete_event_size=4 * LONGEST_QUERY,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listening])
