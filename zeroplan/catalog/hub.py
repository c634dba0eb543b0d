"""Fetches a model's config.json from the Hugging Face Hub, if huggingface_hub is installed.

Only the command line's ``--model`` and the keyword ``model`` of :func:`zeroplan.job` use it. Job files and the browser page
never fetch.
"""

import socket
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from urllib.parse import urlsplit

from zeroplan.catalog.text import one_line
from zeroplan.errors import UnknownNameError

_ANSWER_S, _ALL_S = 5.0, 20.0
"""Time limits for one response of the Hub, and for the whole download including DNS. [s]"""
_LONGEST_REASON = 160


def hub_config(name: str, *, unknown: UnknownNameError) -> Path:
    """Return the config.json of the Hub's model ``owner/name``, fetched or from the local cache. It fetches no other file.

    The Hub's client sends the user's token if there is one. ``unknown``: the catalogue's error for the name; it is raised
    again, with the way out, if the Hub has no file.
    """
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415  optional, and slow to load
    except ImportError:
        raise UnknownNameError(f"{unknown}; to fetch it from the Hub, pip install huggingface_hub") from None
    try:
        found = _within(_ALL_S, lambda: _downloaded(name))
        return Path(found or hf_hub_download(name, "config.json", local_files_only=True))
    except Exception as error:  # noqa: BLE001  the Hub's client raises whatever its network stack raises
        reason = _UNREACHED if type(error).__name__ == "LocalEntryNotFoundError" else one_line(str(error))[:_LONGEST_REASON]
        raise UnknownNameError(f"{unknown}; the Hub gave no config.json either: {reason}") from None


_UNREACHED = f"it cannot be reached within {_ALL_S:g} s, and nothing is kept here"


def _downloaded(name: str) -> str | None:
    """Return the path of the file, fetched if it has changed; None if the Hub cannot be reached or is switched off.

    Without a network the Hub's client would retry for half a minute.
    """
    from huggingface_hub import constants, hf_hub_download  # noqa: PLC0415  as above

    if constants.HF_HUB_OFFLINE:
        return None
    address = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=_ANSWER_S).close()
    except OSError:
        return None
    return hf_hub_download(name, "config.json", etag_timeout=_ANSWER_S)


def _within(seconds: float, call: Callable[[], str | None]) -> str | None:
    """Return the result of a call, or raise its error; None if it takes longer. It then continues in the background."""
    done: SimpleQueue[tuple[str | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            done.put((call(), None))
        except Exception as error:  # noqa: BLE001  raised again by the caller
            done.put((None, error))

    Thread(target=run, daemon=True).start()
    try:
        found, error = done.get(timeout=seconds)
    except Empty:
        return None
    if error is not None:
        raise error
    return found
