"""A model's config.json from the Hugging Face Hub, where huggingface_hub is installed.

Only the command line's ``--model`` and the keyword of :func:`zeroplan.job` get here, with a name that names the Hub. Files and the
page have nothing fetched.
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
"""How long one answer of the Hub may take, and everything together, looking its host up among it. [s]"""
_LONGEST_REASON = 160


def hub_config(name: str, *, unknown: UnknownNameError) -> Path:
    """The config.json of the model that the Hub calls ``owner/name``, fetched, or what is kept of it here; no other file is.

    The Hub's client sends the user's token where there is one. ``unknown`` is what the catalogue said to the name; it is raised
    again, with the way out, where the Hub gives nothing.
    """
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415  optional, and slow to load
    except ImportError:
        raise UnknownNameError(f"{unknown}; to ask the Hub, pip install huggingface_hub") from None
    try:
        found = _within(_ALL_S, lambda: _downloaded(name))
        return Path(found or hf_hub_download(name, "config.json", local_files_only=True))
    except Exception as error:  # noqa: BLE001  the Hub's client raises whatever its network stack raises
        reason = _UNREACHED if type(error).__name__ == "LocalEntryNotFoundError" else one_line(str(error))[:_LONGEST_REASON]
        raise UnknownNameError(f"{unknown}; the Hub gave no config.json either: {reason}") from None


_UNREACHED = f"it cannot be reached within {_ALL_S:g} s, and nothing is kept here"


def _downloaded(name: str) -> str | None:
    """The path of the file, fetched where it has changed; None where the Hub's host takes no connection, or is not to be asked.

    The client would try again for half a minute without a network.
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
    """What a call returns or raises; None where it takes longer, and is then left behind, to end with the program at the latest."""
    done: SimpleQueue[tuple[str | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            done.put((call(), None))
        except Exception as error:  # noqa: BLE001  raised again where it is waited for
            done.put((None, error))

    Thread(target=run, daemon=True).start()
    try:
        found, error = done.get(timeout=seconds)
    except Empty:
        return None
    if error is not None:
        raise error
    return found
