"""Whose fault is it when a run fails: the input's, this program's own refusal, the workload's, or the engine's? And what is said.

One place for a rank in a process of its own and for a simulation in this one. Needs no torch.
"""

import site
import sysconfig
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

from zeroplan.errors import MeasurementError, SpecError, ZeroplanError

_HERE = Path(__file__).parents[1]
Whose = Literal["input", "here", "workload", "engine"]


def whose(error: BaseException) -> Whose:
    """Tell bad input from a refusal, and what a user's workload raised from what an engine did."""
    if isinstance(error, SpecError):
        return "input"
    if isinstance(error, ZeroplanError):
        return "here"
    return "workload" if _passes_through_users_code(error) else "engine"


def text_of(error: BaseException) -> str:
    """One line; of a workload's own error the traceback from its own code on, and not into who watches it."""
    if isinstance(error, ZeroplanError):
        return str(error)
    if whose(error) == "workload":
        shown = traceback.TracebackException.from_exception(error)
        shown.stack = traceback.StackSummary.from_list(_own(list(shown.stack)))
        return "".join(shown.format())
    return f"{type(error).__name__}: {error}"


def workload_raised(text: str, *, rank: int, say: Callable[[str], None]) -> MeasurementError:
    """Show the workload's own traceback, marked as such, and return the one line that stands for it."""
    say(f"--- the workload's own traceback (rank {rank}) ---\n{text.rstrip()}\n--- end of the workload's traceback ---")
    return MeasurementError(f"the workload raised on rank {rank}: {text.rstrip().splitlines()[-1]}{_hint(text)}")


def _hint(text: str) -> str:
    """Say what it takes where torch's error is one that only fake tensors make."""
    return next((hint for name, hint in _ONLY_FAKE.items() if name in text), "")


def _passes_through_users_code(error: BaseException) -> bool:
    """Whether a line that belongs to no library was being run, or could not be read."""
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return True
    return any(_is_users(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def _own(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    first = next((at for at, frame in enumerate(frames) if _is_users(frame.filename)), len(frames))
    watched = (at for at in range(first, len(frames)) if Path(frames[at].filename).is_relative_to(_HERE))
    return frames[first : next(watched, len(frames))]


def _is_users(file: str) -> bool:
    return not file.startswith("<") and not any(Path(file).is_relative_to(library) for library in _libraries())


@cache
def _libraries() -> tuple[Path, ...]:
    installed = (Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return (*installed, Path(site.getusersitepackages()), _HERE)


_ONLY_FAKE = {
    "DataDependentOutputException": "; fake tensors have no values to read: run it with --backend cpu",
    "DynamicOutputShapeException": "; fake tensors have no values that shapes could depend on: run it with --backend cpu",
    "convert all Tensors to FakeTensors": "; a simulation's tensors are fake: make all of them inside the function",
}
