"""Why a script gave no answer, in one line: its own error, or something that cannot be stood in for."""

import traceback
from pathlib import Path

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from zeroplan.dryrun.mail import CompanionError
from zeroplan.dryrun.task import Failed
from zeroplan.errors import ZeroplanError
from zeroplan.verify.fake_cuda.stand_ins import frame_to_name, line_of

_HERE = str(Path(__file__).parent)
_LONGEST = 500
"""Of what a script's error says. [signs]"""
_COMPILER = ("torch._dynamo", "torch._functorch", "torch._inductor")
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def failure(error: BaseException) -> Failed:
    """Whose fault it is, and what is said of it."""
    if isinstance(error, CompanionError):
        return error.failed
    if isinstance(error, ZeroplanError):
        return Failed(whose="here", text=str(error))
    line = _line(error)
    at = f" at {line}" if line else ""
    if isinstance(error, _NEEDS_VALUES):
        return Failed(
            whose="here",
            text=f"operator {error.func} depends on the values of tensors{at}, and tensors on the fake GPU have none; leave it out "
            f"for the dry run, or run the script on a GPU",
        )
    if isinstance(error, UnsupportedOperatorException):
        return Failed(
            whose="here",
            text=f"operator {error.func}{at} has no kernel for tensors without bytes; register one with "
            f"torch.library.register_fake, leave it out for the dry run, or run the script on a GPU",
        )
    if isinstance(error, SystemExit):
        return Failed(
            whose="script",
            text=f"the script left with exit code {error.code!r}{at} before its first step; see what it printed",
        )
    said = f"the script raised {type(error).__name__}{at}: {' '.join(str(error).split())}"[:_LONGEST]
    compiling = type(error).__module__.startswith(_COMPILER)
    return Failed(whose="script", text=f"{said}; add --eager to leave torch.compile out" if compiling else said)


def show(error: BaseException) -> None:
    """Print an error's traceback as Python does, from the script's own first line on."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)


def _is_ours(filename: str) -> bool:
    return filename.startswith((_HERE, "<frozen"))


def _line(error: BaseException) -> str:
    """The innermost line of the user's own code that the error came through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return line_of(frame_to_name(frames[-1])) if frames else ""
