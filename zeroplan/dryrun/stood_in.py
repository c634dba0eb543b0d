"""What was put in the place of a library's code, and how often the script used it. The process of a dry run has one script."""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import torch

T = TypeVar("T")

counts: Counter[tuple[str, str]] = Counter()
"""Uses so far, by what was replaced and what took its place."""


def note(what: str, by: str) -> None:
    """Note one use of something that took the place of ``what``. In a graph that torch compiles it would be a part of the graph."""
    if torch.compiler.is_dynamo_compiling():
        return
    counts[what, by] += 1


def noting(what: str, by: str, function: Callable[..., T]) -> Callable[..., T]:
    """Return a function that notes each of its calls."""

    @wraps(function)
    def noted(*args: object, **kwargs: object) -> T:
        note(what, by)
        return function(*args, **kwargs)

    return noted
