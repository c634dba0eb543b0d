"""A model's config.json from the Hugging Face Hub, where huggingface_hub is installed and a network exists."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

from zeroplan.catalog.config import ConfigRead, read_config_with_note
from zeroplan.catalog.text import one_line
from zeroplan.errors import SpecError, UnknownNameError

_PATIENCE_S = 5
_LONGEST_REASON = 160


def hub_model(name: str, *, treat_as: str | None, unknown: UnknownNameError) -> ConfigRead:
    """Read the shape of the model that the Hub calls ``owner/name``; only its config.json is fetched.

    ``unknown`` is what the catalogue said to the name; it is raised again, with the way out, where the Hub cannot be asked.
    """
    try:
        from huggingface_hub import constants, hf_hub_download  # noqa: PLC0415  optional, and slow to load
    except ImportError:
        raise UnknownNameError(f"{unknown}; to look on the Hub as well, pip install huggingface_hub") from None
    cached_only = not _answers(constants.ENDPOINT)
    try:
        file = hf_hub_download(name, "config.json", etag_timeout=_PATIENCE_S, local_files_only=cached_only)
    except Exception as error:  # noqa: BLE001  the Hub's client raises whatever its network stack raises
        reason = "it cannot be reached, and nothing is cached" if cached_only else one_line(str(error))[:_LONGEST_REASON]
        raise UnknownNameError(f"{unknown}; the Hub gave no config.json either: {reason}") from None
    try:
        return read_config_with_note(Path(file), treat_as=treat_as, name=name)
    except SpecError as error:
        raise SpecError(f"{name} on the Hub: {error}") from None


def _answers(endpoint: str) -> bool:
    """Whether the Hub's host takes a connection: its client would retry for half a minute without a network."""
    address = urlsplit(endpoint)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=_PATIENCE_S).close()
    except OSError:
        return False
    return True
