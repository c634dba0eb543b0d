"""Shows how far a search is, on a terminal and once it has taken two seconds: structures, their rate, and the time left."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroplan.progress import Listener

#: How long an answer may take without a sign of progress. [s]
AFTER_S = 2.0


@contextmanager
def shown_if_slow() -> Iterator[None]:
    """Show a bar on stderr for the searches within this block, one after the other; in a pipe or a file nothing."""
    from zeroplan.progress import progress_reported_to  # noqa: PLC0415  keeps start-up fast

    if not sys.stderr.isatty():
        yield
        return
    begun = monotonic()
    shown: list[Listener] = []
    with ExitStack() as stack:

        def hear(done: int, of: int) -> None:
            if not shown and monotonic() - begun >= AFTER_S:
                shown.append(stack.enter_context(_bar()))
            for show in shown:
                show(done, of)

        with progress_reported_to(hear):
            yield


@contextmanager
def _bar() -> "Iterator[Listener]":
    from rich import progress as rich  # noqa: PLC0415  keeps start-up fast
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    class Rate(rich.ProgressColumn):
        def render(self, task: rich.Task) -> Text:
            return Text("" if task.speed is None else f"{task.speed:,.0f}/s")

    columns = (
        rich.TextColumn("searching"), rich.BarColumn(), rich.MofNCompleteColumn(), Rate(), rich.TextColumn("left"),
        rich.TimeRemainingColumn(),
    )  # fmt: skip
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")

        def show(done: int, of: int) -> None:
            if done == 0:
                progress.reset(task)
            progress.update(task, completed=done, total=of)

        yield show
