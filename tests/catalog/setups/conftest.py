"""The fixture that reads a file with the recipe, arguments or script of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from zeroplan.resolve import Request, Resolved, resolve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Resolved]:
    def read(data: dict[str, Any] | str, name: str = "mine.yaml", **said: Any) -> Resolved:
        (tmp_path / name).write_text(data if isinstance(data, str) else yaml.safe_dump(data))
        return resolve(Request(from_file=str(tmp_path / name), **said))

    return read
