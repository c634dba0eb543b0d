"""Reads torch's message of a GPU that ran out of memory: the size of the failed request, and the memory at that moment.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` (``DeviceCachingAllocator::malloc``; ``format_size`` rounds to two digits), torch
1.10, 2.1 and 2.13.
"""

import re
from typing import NamedTuple

from zeroplan.errors import SpecError
from zeroplan.units import KIB, parse_size

LONGEST_BYTES = 4 * 1024 * KIB
"""How much of a log's end is read; the message is near the end. [bytes]"""
_SIZE = r"(\d+(?:\.\d+)? (?:bytes|KiB|MiB|GiB))"
_TRIED = re.compile(rf"out of memory[.:]? Tried to allocate {_SIZE}", re.IGNORECASE)
_PARTS = {
    "capacity_bytes": (rf"total capac(?:i)?ty of {_SIZE}", rf"{_SIZE} total capacity"),
    "free_bytes": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
    "in_use_bytes": (rf"this process has {_SIZE} memory in use",),
    "allocated_bytes": (rf"Of the allocated memory {_SIZE} is allocated", rf"{_SIZE} already allocated"),
    "unallocated_bytes": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved_bytes": (rf"{_SIZE} reserved in total", rf"{_SIZE} cached"),
    "private_bytes": (rf"{_SIZE} allocated in private pools",),
}


class Message(NamedTuple):
    """The message's figures, which torch rounds to two digits. ``None``: this release of torch does not print it. [bytes]"""

    tried_bytes: int
    """The size requested from the driver: the failed request, rounded up by the allocator."""
    tried_text: str
    """The same, as torch printed it."""
    capacity_bytes: int
    free_bytes: int
    allocated_bytes: int
    """Memory in use by tensors."""
    unallocated_bytes: int
    """Free memory in the allocator's cache."""
    in_use_bytes: int | None = None
    """Memory of the process, including memory outside the allocator."""
    private_bytes: int | None = None
    """The part of the allocated memory that is in private pools of CUDA graphs."""

    @property
    def reserved_bytes(self) -> int:
        """The memory that the allocator has reserved. [bytes]"""
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def outside_bytes(self) -> int | None:
        """Memory of the process outside the allocator: CUDA context, communicators, other libraries. [bytes]"""
        return None if self.in_use_bytes is None else max(0, self.in_use_bytes - self.reserved_bytes)

    @property
    def others_bytes(self) -> int | None:
        """Memory of other processes on the GPU. [bytes]"""
        return None if self.in_use_bytes is None else max(0, self.capacity_bytes - self.free_bytes - self.in_use_bytes)

    @property
    def fragmented(self) -> bool:
        """Whether cache and free memory together were enough, but not in one piece."""
        return self.unallocated_bytes + self.free_bytes >= self.tried_bytes


def read_message(text: str, *, where: str) -> Message:
    """Return the last message in a text. Raises :class:`~zeroplan.errors.SpecError`, one line, if there is none.

    >>> said = read_message(
    ...     "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.02 GiB is "
    ...     "free. Including non-PyTorch memory, this process has 78.20 GiB memory in use. Of the allocated memory 70.10 GiB "
    ...     "is allocated by PyTorch, and 6.90 GiB is reserved by PyTorch but unallocated.", where="a log")
    >>> said.tried_text, said.fragmented, round(said.outside_bytes / 2**30, 2)
    ('1.96 GiB', True, 1.2)
    """
    found = list(_TRIED.finditer(text))
    if not found:
        raise SpecError(
            f"{where} is no snapshot, and has no line 'CUDA out of memory. Tried to allocate …'; give the whole message of torch"
        )
    rest = " ".join(text[found[-1].start() :][:2000].split())
    sizes = {name: size for name, ways in _PARTS.items() if (size := _size(rest, ways)) is not None}
    if "unallocated_bytes" not in sizes and "reserved_bytes" in sizes:
        sizes["unallocated_bytes"] = max(0, sizes["reserved_bytes"] - sizes.get("allocated_bytes", 0))
    lacking = [name for name in ("capacity_bytes", "free_bytes", "allocated_bytes", "unallocated_bytes") if name not in sizes]
    if lacking:
        raise SpecError(
            f"{where}: after 'Tried to allocate {found[-1][1]}' there is no {lacking[0].removesuffix('_bytes')}; give the whole "
            "message, up to 'reserved by PyTorch'"
        )
    sizes.pop("reserved_bytes", None)
    return Message(_bytes(found[-1][1]), found[-1][1], **sizes)


def _size(text: str, ways: tuple[str, ...]) -> int | None:
    for way in ways:
        if found := re.search(way, text):
            return _bytes(found[1])
    return None


def _bytes(text: str) -> int:
    return 0 if float(text.split(maxsplit=1)[0]) == 0 else parse_size(text.replace(" bytes", "B"))


def as_torch_prints(n_bytes: int) -> str:
    """Return a size as torch prints it in the message (``format_size``).

    >>> as_torch_prints(2101346304), as_torch_prints(20 * 2**20)
    ('1.96 GiB', '20.00 MiB')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.2f} {name}"
    return f"{n_bytes} bytes"
