"""Why did a run fail (input, machine, zeroplan, memory, workload, engine), and which message does the user get?

Ranks use it in their own process, simulations in this one. Needs no torch.
"""

import errno
import re
import site
import sysconfig
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

from zeroplan.errors import MeasurementError, SpecError, ZeroplanError

_HERE = Path(__file__).parents[1]
#: Advice for a workload that reads tensor values, which only real tensors have.
WITH_VALUES = "run it with --backend cpu"
Cause = Literal["input", "machine", "here", "memory", "workload", "engine"]


class NotHereError(MeasurementError):
    """This machine cannot run any job now: it has no GPU, or other processes hold it."""


class FailedError(MeasurementError):
    """A rank failed in the engine, died, or stopped answering."""


class OutOfMemoryError(MeasurementError):
    """A rank ran out of memory. For a verdict this is a result, not a failure."""


def ran_out_of_memory(rank: int | str, text: str) -> OutOfMemoryError:
    """The error for a rank whose allocator found no memory."""
    return OutOfMemoryError(f"rank {rank} ran out of memory: {text}")


def cause_of(error: BaseException) -> Cause:
    """What caused an error; ``here`` means that zeroplan refused the job."""
    if isinstance(error, SpecError):
        return "input"
    if isinstance(error, NotHereError):
        return "machine"
    if isinstance(error, ZeroplanError):
        return "here"
    if _lacks_memory(error):
        return "memory"
    if _is_users_code(error):
        return "workload"
    return "machine" if _lacks_a_disk(error) else "engine"


def text_of(error: BaseException) -> str:
    """The error's message in one line; for a workload's own error the traceback, without the frames of zeroplan."""
    if isinstance(error, ZeroplanError):
        return str(error)
    if cause_of(error) == "memory":
        return " ".join(str(error).split()) or type(error).__name__
    if cause_of(error) == "workload":
        shown = traceback.TracebackException.from_exception(error)
        shown.stack = traceback.StackSummary.from_list(_own(list(shown.stack)))
        return "".join(shown.format())
    if isinstance(error, OSError) and _lacks_a_disk(error):
        return f"a file cannot be written{f' ({error.filename!r})' if error.filename else ''}: {error.strerror}"
    return nccl_error(str(error)) or f"{type(error).__name__}: {error}"


def _lacks_a_disk(error: BaseException) -> bool:
    """Whether the disk is full or read-only; every case would fail the same way."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def _lacks_memory(error: BaseException) -> bool:
    """Whether an allocator ran out of memory; compares class names, since torch may be absent."""
    text = str(error)
    names = [cls.__name__ for cls in type(error).__mro__]
    return "OutOfMemoryError" in names or "MemoryError" in names or any(message in text for message in _NO_MEMORY)


_NO_MEMORY = ("CUDA out of memory", "Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'",
              "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory")  # fmt: skip


def nccl_error(text: str) -> str:
    r"""NCCL's error in one line; empty if the text is no error of NCCL.

    >>> nccl_error("NCCL error in: ../NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details), "
    ...                 "NCCL version 2.27.3\nncclSystemError: System call failed.\nLast error:\nsocketConnect: no route")
    'NCCL 2.27.3: unhandled system error: socketConnect: no route; set NCCL_DEBUG=INFO for details'
    >>> nccl_error("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 9 ms")
    'NCCL: a collective (ALLREDUCE) timed out: at least one rank never called it'
    """
    if found := re.search(r"collective operation timeout: WorkNCCL\(.*?OpType=(\w+)", text):
        return f"NCCL: a collective ({found[1]}) timed out: at least one rank never called it"
    if not (found := re.search(r"NCCL error in: [^,]*, ([^,(]*)(?:\([^)]*\))?(?:, NCCL version (\S+))?", text)):
        return ""
    last = text.partition("Last error:")[2].strip().splitlines()[:1] or text.splitlines()[1:2]
    version = f" {found[2]}" if found[2] else ""
    return f"NCCL{version}: {': '.join((found[1].strip(), *last))}; set NCCL_DEBUG=INFO for details"


def workload_raised(
    text: str, *, rank: int, say: Callable[[str], None], instead: str = WITH_VALUES
) -> MeasurementError:  # fmt: skip
    """Print the workload's own traceback, and return an error with its last line.

    ``instead`` is the advice for a workload that reads values, which fake tensors do not have.
    """
    say(f"--- the workload's own traceback (rank {rank}) ---\n{text.rstrip()}\n--- end of the workload's traceback ---")
    return MeasurementError(f"the workload raised on rank {rank}: {text.rstrip().splitlines()[-1]}{hint(text, instead)}")


def hint(text: str, instead: str) -> str:
    """Advice to append to an error that only fake tensors raise; empty for other errors."""
    return next((advice.format(instead=instead) for name, advice in _ONLY_FAKE.items() if name in text), "")


def _is_users_code(error: BaseException) -> bool:
    """Whether a frame of the traceback, or the file of a syntax error, belongs to no library."""
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
    "DataDependentOutputException": "; fake tensors have no values to read: {instead}",
    "DynamicOutputShapeException": "; fake tensors have no values that shapes could depend on: {instead}",
    "convert all Tensors to FakeTensors": "; a simulation's tensors are fake: make all of them inside the function",
}
