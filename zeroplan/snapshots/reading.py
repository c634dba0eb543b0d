"""A snapshot as a file: data that anybody may have written, so nothing in it is run and nothing believed unchecked.

A pickle is a program for a small machine. This one is given no way to reach a class or a function, without which it can build
numbers, texts, lists and dicts and nothing else; that is all a snapshot is made of.
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
"""Millions of events; in Python's memory a snapshot is several times as large."""
_AT_LEAST_BYTES, _TIMES = 512 * MIB, 64
"""How much memory reading may take, and how much more per byte of the file."""
_LARGEST_NUMBER = 2**64

Action = Literal["asked", "released", "out of memory", "grown", "shrunk"]
_ACTIONS: dict[str, Action] = {
    "alloc": "asked", "free_requested": "released", "oom": "out of memory", "segment_alloc": "grown", "segment_map": "grown",
    "segment_free": "shrunk", "segment_unmap": "shrunk",
}  # fmt: skip


class Frame(NamedTuple):
    """A place in a program."""

    file: str
    name: str
    line: int


Stack = tuple[Frame, ...]


class Event(NamedTuple):
    """A request, its release, a request that failed, a segment taken from the card or given back; innermost frame first.

    Of a request that failed ``address`` is what the driver said was free. [bytes]
    """

    action: Action
    address: int
    n_bytes: int
    stack: Stack
    time_us: int
    stream: int


class Segment(NamedTuple):
    """Memory taken from the card in one piece, and the stream it is for. [bytes]"""

    address: int
    n_bytes: int
    stream: int


class Standing(NamedTuple):
    """A block in use when the snapshot was taken."""

    address: int
    n_bytes: int
    stack: Stack


class Snapshot(NamedTuple):
    """What one device's allocator did, as far back as it remembers, and how it stood in the end. [bytes]

    ``largest_free_bytes`` is the largest free stretch within what is reserved.
    """

    device: int
    events: tuple[Event, ...]
    standing: tuple[Standing, ...]
    segments: tuple[Segment, ...]
    reserved_bytes: int
    largest_free_bytes: int
    expandable_segments: bool
    steps: tuple[tuple[int, int], ...]
    """When an optimizer stepped, as the snapshot's annotations say: from, to. [microseconds]"""


def read_snapshot(path: Path, *, device: int | None = None) -> Snapshot:
    """Read a snapshot of the device whose allocator did most, or of the one that is named.

    Raises :class:`~zeroplan.errors.SpecError`, in one line, for everything that is no snapshot, and for every pickle that wants
    to do more than hold data.
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
        raise SpecError(f"{where} is not as torch writes it ({type(error).__name__}: {str(error)[:80]})") from None


class _DataOnly(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts, and refuses all that would need a name looked up."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise SpecError(f"it wants to run {module}.{name}, and a snapshot holds data alone; it was not opened")

    def persistent_load(self, _pid: object) -> NoReturn:
        raise SpecError("it refers to something outside itself, and a snapshot holds data alone; it was not opened")


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
        raise SpecError(f"{where} asks for more memory than there is") from None
    except Exception as error:  # noqa: BLE001  a broken pickle raises almost anything
        raise SpecError(
            f"{where} is no complete pickle ({type(error).__name__}): give the file that torch.cuda.memory._dump_snapshot wrote, "
            "or where there is only a message, ask what the job would have needed: zeroplan estimate"
        ) from None


def _fault(path: Path) -> str | None:
    if "\0" in str(path) or not path.exists():
        return "does not exist; check the path"
    if not path.is_file():
        return "is not a file; give the path of one"
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
    """The blocks of a segment with their addresses, which older snapshots leave to be added up."""
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
    """Stacks as tuples; the same list of frames, which the file shares between events, is read once."""

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
            continue  # a release is completed, a snapshot taken
        address = entry["device_free"] if action == "out of memory" else entry["addr"]
        numbers = (_number(entry.get(key, 0)) for key in ("time_us", "stream"))
        yield Event(action, _number(address), _number(entry["size"]), stacks.of(entry), *numbers)


def _standing(block: Mapping[str, object], stacks: _Stacks) -> Standing:
    size = block.get("requested_size", block["size"])
    return Standing(_number(block["address"]), _number(size), stacks.of(block))


def _steps(annotations: object, device: int) -> Iterator[tuple[int, int]]:
    """The spans that torch notes of ``Optimizer.step``."""
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
        raise TypeError(f"a {type(value).__name__} where a list should be")
    return value


def _dict(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} where a dict should be")
    return value


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a {type(value).__name__} where a whole number should be")
    if not 0 <= value < _LARGEST_NUMBER:
        raise ValueError("a number that no memory has")
    return value
