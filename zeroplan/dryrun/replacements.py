"""Counts how often the script used replaced library code; the process has one script."""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import torch

T = TypeVar("T")

counts: Counter[tuple[str, str]] = Counter()
"""Uses so far, by replaced code and its replacement."""


def note(what: str, by: str) -> None:
    """Count one use of a replacement. Does nothing while torch compiles, since the graph would contain the call."""
    if torch.compiler.is_dynamo_compiling():
        return
    counts[what, by] += 1


def noting(what: str, by: str, function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function so that each call is counted."""

    @wraps(function)
    def noted(*args: object, **kwargs: object) -> T:
        note(what, by)
        return function(*args, **kwargs)

    return noted
