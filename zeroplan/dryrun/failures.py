"""Why did a script give no answer: its own error, or a function that a dry run cannot replace?"""

import traceback
from pathlib import Path

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from zeroplan.dryrun.rank_messages import CompanionError
from zeroplan.dryrun.task import Failed
from zeroplan.errors import ZeroplanError
from zeroplan.verify.fake_cuda.stand_ins import frame_to_name, line_of

_HERE = str(Path(__file__).parent)
_LONGEST = 500
"""Longest part of a script's error message to show. [characters]"""
_COMPILER = ("torch._dynamo", "torch._functorch", "torch._inductor")
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def failure(error: BaseException) -> Failed:
    """The cause of an error and its message."""
    if isinstance(error, CompanionError):
        return error.failed
    if isinstance(error, ZeroplanError):
        return Failed(cause="here", text=str(error))
    line = _line(error)
    at = f" at {line}" if line else ""
    if isinstance(error, _NEEDS_VALUES):
        return Failed(
            cause="here",
            text=f"operator {error.func} depends on the values of tensors{at}, and tensors on the fake GPU have none; leave it out "
            f"for the dry run, or run the script on a GPU",
        )
    if isinstance(error, UnsupportedOperatorException):
        return Failed(
            cause="here",
            text=f"operator {error.func}{at} has no kernel for tensors without bytes; register one with "
            f"torch.library.register_fake, leave it out for the dry run, or run the script on a GPU",
        )
    if isinstance(error, SystemExit):
        return Failed(
            cause="script", text=f"the script exited with code {error.code!r}{at} before its first step; read its output"
        )
    message = f"the script raised {type(error).__name__}{at}: {' '.join(str(error).split())}"[:_LONGEST]
    compiling = type(error).__module__.startswith(_COMPILER)
    return Failed(cause="script", text=f"{message}; add --eager to leave torch.compile out" if compiling else message)


def show(error: BaseException) -> None:
    """Print an error's traceback as Python does, beginning with the script's first line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_HERE, "<frozen")):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)


def _line(error: BaseException) -> str:
    """The innermost line of the user's own code in the traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return line_of(frame_to_name(frames[-1])) if frames else ""
