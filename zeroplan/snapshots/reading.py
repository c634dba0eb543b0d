"""Reads a snapshot file as untrusted data: no code in it runs, and every value is checked.

A pickle can run code by naming classes and functions. The unpickler here refuses all names, so it can only build numbers, texts,
lists and dicts, which is all that a snapshot contains.
Source: ``torch/csrc/cuda/memory_snapshot.cpp`` (``_memory_snapshot_pickled``) and
``torch/cuda/memory.py`` (``_snapshot``), torch 2.13.
"""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

from zeroplan.errors import SpecError
from zeroplan.memory_limit import no_more_memory_than
from zeroplan.units import MIB

LARGEST_FILE_BYTES = 2048 * MIB
"""Enough for millions of events. A snapshot needs several times its file's size in Python's memory."""
_AT_LEAST_BYTES, _TIMES = 512 * MIB, 64
"""Memory that reading may use: a base, and a multiple of the file's size."""
_LARGEST_NUMBER = 2**64

Action = Literal["requested", "released", "out of memory", "grown", "shrunk"]
_ACTIONS: dict[str, Action] = {
    "alloc": "requested", "free_requested": "released", "oom": "out of memory", "segment_alloc": "grown", "segment_map": "grown",
    "segment_free": "shrunk", "segment_unmap": "shrunk",
}  # fmt: skip


class Frame(NamedTuple):
    """A stack frame."""

    file: str
    name: str
    line: int


Stack = tuple[Frame, ...]


class Event(NamedTuple):
    """A request, a release, a failed request, or a segment that was allocated or freed. [bytes]

    The stack begins with the innermost frame. The ``address`` of a failed request is the driver's free memory.
    """

    action: Action
    address: int
    n_bytes: int
    stack: Stack
    time_us: int
    stream: int


class Segment(NamedTuple):
    """A segment, which the allocator got from the driver in one piece, and its stream. [bytes]"""

    address: int
    n_bytes: int
    stream: int


class Standing(NamedTuple):
    """A block in use when the snapshot was written."""

    address: int
    n_bytes: int
    stack: Stack


class Snapshot(NamedTuple):
    """The history of one device's allocator, and its state at the end. [bytes]

    ``largest_free_bytes`` is the largest free block within the reserved memory.
    """

    device: int
    events: tuple[Event, ...]
    standing: tuple[Standing, ...]
    segments: tuple[Segment, ...]
    reserved_bytes: int
    largest_free_bytes: int
    expandable_segments: bool
    steps: tuple[tuple[int, int], ...]
    """Start and end of each optimizer step, from the snapshot's annotations. [microseconds]"""


def read_snapshot(path: Path, *, device: int | None = None) -> Snapshot:
    """The snapshot of the device with most events, or of the named one.

    Raises :class:`~zeroplan.errors.SpecError`, in one line, for any file that is not a snapshot, and for any pickle that contains
    more than plain data.
    """
    where = f"snapshot {str(path)!r}"
    data = _unpickled(path, where)
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("segments"), list)
        or not isinstance(data.get("device_traces"), list)
    ):
        raise SpecError(
            f"{where} is a pickle, but not of torch.cuda.memory._dump_snapshot: it has no segments and device_traces"
        )
    try:
        return _snapshot(data, device, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{where} does not have torch's format ({type(error).__name__}: {str(error)[:80]})") from None


class _DataOnly(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts; raises for a pickle that names a class or a function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise SpecError(f"it wants to run {module}.{name}, but a snapshot contains only data; it was not opened")

    def persistent_load(self, _pid: object) -> NoReturn:
        raise SpecError("it refers to something outside itself, but a snapshot contains only data; it was not opened")


def _unpickled(path: Path, where: str) -> object:
    fault = _fault(path)
    if fault:
        raise SpecError(f"{where} {fault}")
    try:
        with path.open("rb") as file, no_more_memory_than(_AT_LEAST_BYTES + _TIMES * path.stat().st_size):
            return _DataOnly(file).load()
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    except OSError as error:
        raise SpecError(f"{where} cannot be read: {error.strerror}") from None
    except MemoryError:
        raise SpecError(f"{where} needs more memory than its size justifies; it was not read") from None
    except Exception as error:  # noqa: BLE001  a broken pickle raises almost anything
        raise SpecError(
            f"{where} is not a complete pickle ({type(error).__name__}): give the file of torch.cuda.memory._dump_snapshot; "
            "if you have only an error message, estimate the job with `zeroplan estimate`"
        ) from None


def _fault(path: Path) -> str | None:
    if "\0" in str(path) or not path.exists():
        return "does not exist; check the path"
    if not path.is_file():
        return "is not a file; give the path of a file"
    if path.stat().st_size > LARGEST_FILE_BYTES:
        return f"is larger than {LARGEST_FILE_BYTES // MIB:,} MiB; record fewer events (max_entries)"
    return None


def _snapshot(data: Mapping[str, object], device: int | None, where: str) -> Snapshot:
    traces = [trace if isinstance(trace, list) else [] for trace in _list(data["device_traces"])]
    segments = [_dict(segment) for segment in _list(data["segments"])]
    chosen = _chosen(traces, segments, device, where)
    mine = [segment for segment in segments if _number(segment.get("device", chosen)) == chosen]
    blocks = [block for segment in mine for block in _placed(segment)]
    stacks = _Stacks()
    in_use = (block for block in blocks if str(block["state"]).startswith("active_allocated"))
    return Snapshot(
        device=chosen,
        events=tuple(_events(traces[chosen] if chosen < len(traces) else [], stacks)),
        standing=tuple(_standing(block, stacks) for block in in_use),
        segments=tuple(
            Segment(*(_number(segment.get(key, 0)) for key in ("address", "total_size", "stream"))) for segment in mine
        ),
        reserved_bytes=sum(_number(segment["total_size"]) for segment in mine),
        largest_free_bytes=max((_number(block["size"]) for block in blocks if block["state"] == "inactive"), default=0),
        expandable_segments=any(segment.get("is_expandable") is True for segment in mine),
        steps=tuple(_steps(data.get("external_annotations"), chosen)),
    )


def _placed(segment: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """The blocks of a segment with their addresses, which older snapshots leave out."""
    address = _number(segment["address"])
    for one in _list(segment["blocks"]):
        block = _dict(one)
        yield {"address": address, **block}
        address += _number(block["size"])


def _chosen(traces: list[list[object]], segments: list[Mapping[str, object]], device: int | None, where: str) -> int:
    busy = {number: len(trace) for number, trace in enumerate(traces) if trace}
    for segment in segments:
        busy.setdefault(_number(segment.get("device", 0)), 0)
    if device is not None and device not in busy:
        raise SpecError(f"{where} has no device {device}; it has {', '.join(map(str, sorted(busy))) or 'none'}")
    if not busy:
        raise SpecError(f"{where} is empty: no device had reserved memory or a history")
    return device if device is not None else max(busy, key=lambda number: (busy[number], -number))


class _Stacks:
    """Converts stacks to tuples; a list of frames that several events share is converted only once."""

    def __init__(self) -> None:
        self._read: dict[int, Stack] = {}
        self._frames: dict[Frame, Frame] = {}

    def of(self, entry: Mapping[str, object]) -> Stack:
        frames = entry.get("frames")
        if not frames:
            return ()
        found = self._read.get(id(frames))
        if found is None:
            found = tuple(self._frame(_dict(frame)) for frame in _list(frames))
            self._read[id(frames)] = found
        return found

    def _frame(self, frame: Mapping[str, object]) -> Frame:
        made = Frame(str(frame.get("filename", "")), str(frame.get("name", "")), _number(frame.get("line", 0)))
        return self._frames.setdefault(made, made)


def _events(trace: list[object], stacks: _Stacks) -> Iterator[Event]:
    for one in trace:
        entry = _dict(one)
        action = _ACTIONS.get(str(entry["action"]))
        if action is None:
            continue  # other actions: a completed release, a snapshot
        address = entry["device_free"] if action == "out of memory" else entry["addr"]
        numbers = (_number(entry.get(key, 0)) for key in ("time_us", "stream"))
        yield Event(action, _number(address), _number(entry["size"]), stacks.of(entry), *numbers)


def _standing(block: Mapping[str, object], stacks: _Stacks) -> Standing:
    size = block.get("requested_size", block["size"])
    return Standing(_number(block["address"]), _number(size), stacks.of(block))


def _steps(annotations: object, device: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each ``Optimizer.step`` annotation. [microseconds]"""
    began: int | None = None
    for one in annotations if isinstance(annotations, list) else []:
        entry = _dict(one)
        if not str(entry.get("name", "")).startswith("Optimizer.step") or _number(entry.get("device", 0)) != device:
            continue
        if entry.get("stage") == "START":
            began = _number(entry["time_us"])
        elif began is not None:
            yield began, _number(entry["time_us"])
            began = None


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} instead of a list")
    return value


def _dict(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} instead of a dict")
    return value


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a {type(value).__name__} instead of a whole number")
    if not 0 <= value < _LARGEST_NUMBER:
        raise ValueError("a number outside the range of memory sizes")
    return value
