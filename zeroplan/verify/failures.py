"""Whose fault is it when a run fails: the input's, this program's own refusal, the workload's, or the engine's? And what is said.

One place for a rank in a process of its own and for a simulation in this one. Needs no torch.
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
#: What to do with a workload that reads values, where it can be run on real tensors.
WITH_VALUES = "run it with --backend cpu"
Whose = Literal["input", "machine", "here", "memory", "workload", "engine"]


class NotHereError(MeasurementError):
    """This machine cannot run it now, whatever the job: no GPU, or one that others hold."""


class FailedError(MeasurementError):
    """A rank failed in the engine, died, or was silent."""


class OutOfMemoryError(MeasurementError):
    """A rank asked for more memory than there was: of a verdict that is a result too."""


def ran_out_of_memory(rank: int | str, text: str) -> OutOfMemoryError:
    """What stands for an allocator's own error."""
    return OutOfMemoryError(f"rank {rank} ran out of memory: {text}")


def whose(error: BaseException) -> Whose:
    """Tell bad input from a refusal, and what a user's workload raised from what an engine did."""
    if isinstance(error, SpecError):
        return "input"
    if isinstance(error, NotHereError):
        return "machine"
    if isinstance(error, ZeroplanError):
        return "here"
    if _lacks_memory(error):
        return "memory"
    if _passes_through_users_code(error):
        return "workload"
    return "machine" if _lacks_a_disk(error) else "engine"


def text_of(error: BaseException) -> str:
    """One line; of a workload's own error the traceback from its own code on, and not into who watches it."""
    if isinstance(error, ZeroplanError):
        return str(error)
    if whose(error) == "memory":
        return " ".join(str(error).split()) or type(error).__name__
    if whose(error) == "workload":
        shown = traceback.TracebackException.from_exception(error)
        shown.stack = traceback.StackSummary.from_list(_own(list(shown.stack)))
        return "".join(shown.format())
    if isinstance(error, OSError) and _lacks_a_disk(error):
        return f"a file cannot be written{f' ({error.filename!r})' if error.filename else ''}: {error.strerror}"
    return of_a_transport(str(error)) or f"{type(error).__name__}: {error}"


def _lacks_a_disk(error: BaseException) -> bool:
    """Whether what an engine or library writes found no room, or nothing that it may write to: so will it in every case."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def _lacks_memory(error: BaseException) -> bool:
    """Whether an allocator, of torch's or of a library, found no more memory: told by name, since torch may be absent."""
    text = str(error)
    names = [cls.__name__ for cls in type(error).__mro__]
    return "OutOfMemoryError" in names or "MemoryError" in names or any(said in text for said in _NO_MEMORY)


_NO_MEMORY = ("CUDA out of memory", "Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'",
              "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory")  # fmt: skip


def of_a_transport(text: str) -> str:
    r"""NCCL's error in one line: what it calls it, and what it says happened; empty where it is none of NCCL's.

    >>> of_a_transport("NCCL error in: ../NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details), "
    ...                 "NCCL version 2.27.3\nncclSystemError: System call failed.\nLast error:\nsocketConnect: no route")
    'NCCL 2.27.3: unhandled system error: socketConnect: no route; NCCL_DEBUG=INFO says more'
    >>> of_a_transport("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 9 ms")
    'NCCL: a collective (ALLREDUCE) timed out, so another rank never came to it'
    """
    if found := re.search(r"collective operation timeout: WorkNCCL\(.*?OpType=(\w+)", text):
        return f"NCCL: a collective ({found[1]}) timed out, so another rank never came to it"
    if not (found := re.search(r"NCCL error in: [^,]*, ([^,(]*)(?:\([^)]*\))?(?:, NCCL version (\S+))?", text)):
        return ""
    last = text.partition("Last error:")[2].strip().splitlines()[:1] or text.splitlines()[1:2]
    version = f" {found[2]}" if found[2] else ""
    return f"NCCL{version}: {': '.join((found[1].strip(), *last))}; NCCL_DEBUG=INFO says more"


def workload_raised(
    text: str, *, rank: int, say: Callable[[str], None], instead: str = WITH_VALUES
) -> MeasurementError:  # fmt: skip
    """Show the workload's own traceback, marked as such, and return the one line that stands for it.

    ``instead`` is what to do where the workload reads values, which fake tensors do not have.
    """
    say(f"--- the workload's own traceback (rank {rank}) ---\n{text.rstrip()}\n--- end of the workload's traceback ---")
    return MeasurementError(f"the workload raised on rank {rank}: {text.rstrip().splitlines()[-1]}{hint(text, instead)}")


def hint(text: str, instead: str) -> str:
    """What it takes where torch's error is one that only fake tensors make, as the end of a sentence; empty for other errors."""
    return next((said.format(instead=instead) for name, said in _ONLY_FAKE.items() if name in text), "")


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
    "DataDependentOutputException": "; fake tensors have no values to read: {instead}",
    "DynamicOutputShapeException": "; fake tensors have no values that shapes could depend on: {instead}",
    "convert all Tensors to FakeTensors": "; a simulation's tensors are fake: make all of them inside the function",
}
