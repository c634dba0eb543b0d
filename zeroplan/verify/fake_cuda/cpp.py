"""Makes torch's C++ report a CUDA GPU. The only file that writes to memory of C++; it checks every step.

A CPU build of torch refuses ``device="cuda"`` in two places. Both can be changed from Python without a compiler:

1. ``c10::impl::device_guard_impl_registry`` is an exported array with one device guard per device type, empty for CUDA. torch has
   a guard for backends written in Python (``torch._C._acc``), which this file registers for CUDA. That guard calls Python for the
   kind of its devices and streams, even while a script's error unwinds through C++, which would end the process. So its virtual
   table is copied, and the entries that name a device or stream return CUDA's first without Python.
2. ``at::detail::getCUDAHooks()`` is exported and returns an object whose virtual functions report whether CUDA was built and is
   available. Its table is copied, and three entries return true. CUDA is then the accelerator, which autograd requires.

It works with CPU and CUDA builds (tried: torch 2.13 with CUDA 13.0, without a driver). Use it in a process that does nothing else.

Source: torch 2.11 to 2.15, ``c10/core/impl/DeviceGuardImplInterface.h`` (``device_guard_impl_registry``),
``aten/src/ATen/detail/AcceleratorHooksInterface.h`` (the order of the virtual functions) and ``CUDAHooksInterface.h``. It follows
the Itanium C++ ABI: Linux, x86-64 and ARM.
"""

import ctypes
import mmap
import os
import platform
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from zeroplan.verify.failures import NotHereError

_CUDA, _PRIVATE_USE_1 = 1, 20
"""``c10::DeviceType``."""
_DEVICE_TYPES = 22
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_GET_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_IS_BUILT, _IS_AVAILABLE, _HAS_PRIMARY_CONTEXT = 2, 3, 4
"""Entries in the table of ``AcceleratorHooksInterface``, after two destructors."""
_GUARDS_FUNCTIONS = [
    "type", "exchangeDevice", "getDevice", "setDevice", "uncheckedSetDevice", "getStream", "getDefaultStream",
    "getStreamFromGlobalPool", "getNewStream", "exchangeStream",
]  # fmt: skip
"""The first entries in the table of ``DeviceGuardImplInterface``, whose destructors come last."""
_NAME_A_DEVICE = tuple(at for at, name in enumerate(_GUARDS_FUNCTIONS) if name not in ("setDevice", "uncheckedSetDevice"))
_FIRST_FUNCTIONS = {
    "ATen/detail/AcceleratorHooksInterface.h": ["isBuilt", "isAvailable", "hasPrimaryContext"],
    "c10/core/impl/DeviceGuardImplInterface.h": _GUARDS_FUNCTIONS,
}
_NAME_THE_CURRENT = tuple(map(_GUARDS_FUNCTIONS.index, ("exchangeDevice", "getDevice")))
"""Streams stay those of cuda:0: autograd has a list with one entry per device that the guard counts."""
_MACHINE: dict[str, Callable[[int], bytes]] = {
    "x86_64": lambda number: (
        b"\xb8" + number.to_bytes(4, "little") + bytes.fromhex("31d2c3")
    ),  # mov eax, number; xor edx, edx; ret
    "aarch64": lambda number: (0xD2800000 | number << 5).to_bytes(4, "little") + bytes.fromhex("010080d2c0035fd6"),
    # mov x0, number; mov x1, 0; ret
}
"""Machine code that returns a 16-bit number, and 0 in the second register.

1 means true, ``DeviceType`` CUDA, and with 0 in the second byte ``Device`` cuda:0 and its ``Stream`` 0; 2 in that byte is cuda:2.
"""
_SECOND_BYTE = 8
_MOST_DEVICES = 128
"""``c10::DeviceIndex`` is a signed byte."""
_ENTRIES = 96
"""Table entries to copy; both tables have fewer."""
_BEFORE_TABLE = 2
"""Entries in front of the table that belong to it: the offset to the top, and the type information."""
_POINTER = ctypes.sizeof(ctypes.c_void_p)

_GUARDS: list[ctypes.Array[ctypes.c_void_p]] = []
"""The table of CUDA's guard, once registered."""
_KEPT: list[object] = []
"""Objects whose addresses C++ holds; they must live as long as the process."""
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_KEPT))  # at exit Python clears modules before C++ is done


def enable_cuda() -> None:
    """Make torch's C++ report a CUDA GPU. Raises NotHereError where that is impossible."""
    if torch.cuda.is_available():
        raise NotHereError("this process sees a real GPU; hide it with CUDA_VISIBLE_DEVICES='' before torch is imported")
    require_platform()
    if _KEPT:
        return
    _require_order()
    c10, aten = (_library(name) for name in ("libc10.so", "libtorch_cpu.so"))
    _register_guard(c10)
    _report_available(aten)
    if (found := torch._C._accelerator_getAccelerator()) != torch.device("cuda"):
        raise _unknown(f"says that its accelerator is {found}")


def require_platform() -> None:
    """Raise NotHereError on platforms where the layout of torch's C++ objects is unknown."""
    here = f"{sys.platform} on {platform.machine()}"
    if not sys.platform.startswith("linux") or platform.machine() not in _MACHINE:
        raise NotHereError(f"a fake GPU needs Linux on x86-64 or ARM, and this is {here}; use a container or a virtual machine")


def _require_order() -> None:
    """Check in torch's own headers that the virtual functions have the known order."""
    for name, known in _FIRST_FUNCTIONS.items():
        header = Path(torch.__file__).parent / "include" / name
        if not header.is_file():
            continue
        functions = re.findall(r"virtual \w+ (\w+)\(", header.read_text(encoding="utf-8"))
        if functions[: len(known)] != known:
            raise _unknown(f"orders the functions of its {header.stem} otherwise")


def _library(name: str) -> ctypes.CDLL:
    path = Path(torch.__file__).parent / "lib" / name
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        raise _unknown(f"has no {name}") from None


def _register_guard(c10: ctypes.CDLL) -> None:
    """Register torch's Python guard for CUDA, and restore the entry through which torch registers it."""
    try:
        registry = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(c10, _REGISTRY)
        register = torch._C._acc.register_python_privateuseone_device_guard
    except (ValueError, AttributeError) as error:
        raise _unknown(f"has no registry of device guards ({error})") from None
    before, guard = registry[_PRIVATE_USE_1], torch._C._acc.DeviceGuard()
    register(guard)
    if registry[_PRIVATE_USE_1] == before:
        raise _unknown("keeps its device guards elsewhere")
    registry[_CUDA], registry[_PRIVATE_USE_1] = registry[_PRIVATE_USE_1], before
    _KEPT.append(guard)
    _GUARDS.append(_return_one(registry[_CUDA] or 0, _NAME_A_DEVICE))


def set_current_device(index: int) -> None:
    """Set the device that ``"cuda"`` without an index means, as in ``tensor.cuda()``."""
    for entries in _GUARDS if 0 <= index < _MOST_DEVICES else ():
        for entry in _NAME_THE_CURRENT:
            entries[_BEFORE_TABLE + entry] = _returns(1 | index << _SECOND_BYTE)


def _report_available(aten: ctypes.CDLL) -> None:
    try:
        hooks_of = aten[_GET_HOOKS]
    except AttributeError:
        raise _unknown("has no CUDA hooks") from None
    hooks_of.restype = ctypes.c_void_p
    _return_one(hooks_of(), (_IS_BUILT, _IS_AVAILABLE, _HAS_PRIMARY_CONTEXT))


def _return_one(instance: int, functions: tuple[int, ...]) -> "ctypes.Array[ctypes.c_void_p]":
    """Make virtual functions of a C++ object return 1 (and 0 in the second register); return its new table."""
    table = ctypes.c_void_p.from_address(instance).value or 0
    start = table - _BEFORE_TABLE * _POINTER
    entries = (ctypes.c_void_p * _ENTRIES)(*(ctypes.c_void_p * _ENTRIES).from_address(start))
    for entry in functions:
        entries[_BEFORE_TABLE + entry] = _returns(1)
    ctypes.c_void_p.from_address(instance).value = ctypes.addressof(entries) + _BEFORE_TABLE * _POINTER
    _KEPT.append(entries)
    return entries


@cache
def _returns(number: int) -> int:
    """The address of a function that returns a number, in a page that is written first and executable afterwards."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page.write(_MACHINE[platform.machine()](number))
    start = ctypes.c_char.from_buffer(page)
    _KEPT.append(start)
    address = ctypes.addressof(start)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC):
        raise NotHereError(
            f"executable memory is forbidden here ({os.strerror(ctypes.get_errno())}), which a fake GPU needs; use another machine"
        )
    return address


def _unknown(difference: str) -> NotHereError:
    return NotHereError(
        f"torch {torch.__version__} {difference}, so zeroplan cannot fake a GPU; install an official build of torch 2.11 to 2.15"
    )
