"""What do other programs' keys do to memory where no reader counts them? The sections of ``keys.toml``."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Keys(NamedTuple):
    """Keys of a program, or of one of its tables, as words or patterns; ``keys.toml`` describes the fields."""

    refused: str = ""
    saves: str = ""
    adds: str = ""
    either: str = ""
    known: str = ""
    harmless: Mapping[str, list[object]] = {}
    instead: Mapping[str, str] = {}


def keys_of(name: str) -> Keys:
    """Return the section of a program, or of one of its tables.

    >>> keys_of("accelerate-fsdp").refused
    'fsdp_ignored_modules'
    """
    return Keys(**_sections()[name])


@cache
def _sections() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8"))
