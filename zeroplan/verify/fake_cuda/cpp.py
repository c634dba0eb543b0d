"""What reaches into torch's C++: the only file that does, with a check behind every step.

A CPU build of torch refuses ``device="cuda"`` in two places. Both can be changed from Python without a compiler:

1. ``c10::impl::device_guard_impl_registry`` is an exported array of one device guard per device type, empty for CUDA. torch has a
   guard that is written in Python (``torch._C._acc``), for a backend of one's own; it is put in CUDA's place.
2. ``at::detail::getCUDAHooks()`` is exported and returns an object whose virtual functions say whether CUDA was built and is
   available. Its table is copied, and three entries are made to say yes. Then CUDA is the accelerator, on which autograd insists.

It works with builds for the CPU and for CUDA (torch 2.13 with CUDA 13.0 was tried, without a driver).
This writes to memory of the process that belongs to C++. It is for a process that does nothing else.

Source: torch 2.11 to 2.15, ``c10/core/impl/DeviceGuardImplInterface.h`` (``device_guard_impl_registry``),
``aten/src/ATen/detail/AcceleratorHooksInterface.h`` (the order of the virtual functions) and ``CUDAHooksInterface.h``. It follows
the Itanium C++ ABI: Linux, x86-64 and ARM.
"""

import ctypes
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

from zeroplan.verify.failures import NotHereError

_CUDA, _PRIVATE_USE_1 = 1, 20
"""``c10::DeviceType``."""
_DEVICE_TYPES = 22
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_GET_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_IS_BUILT, _IS_AVAILABLE, _HAS_PRIMARY_CONTEXT = 2, 3, 4
"""Entries in the table of ``AcceleratorHooksInterface``, behind two destructors."""
_FIRST_FUNCTIONS = ["isBuilt", "isAvailable", "hasPrimaryContext"]
_ENTRIES = 96
"""As many entries of the table are copied; ``CUDAHooksInterface`` has fewer."""
_BEFORE_TABLE = 2
"""Entries in front of the table that belong to it: the offset to the top, and the type's information."""
_POINTER = ctypes.sizeof(ctypes.c_void_p)

_KEPT: list[object] = []
"""What C++ holds addresses of: it stays for as long as the process."""


class _Guard(torch._C._acc.DeviceGuard):
    """A guard that changes no device, and says that it is CUDA's."""

    def type_(self) -> Any:  # noqa: ANN401  an enum of C++'s
        return torch._C._autograd.DeviceType.CUDA


def make_cuda_known() -> None:
    """Have torch's C++ take CUDA for a device that is there. Raises NotHereError where that cannot be done, in one line."""
    if torch.cuda.is_available():
        raise NotHereError("this process sees a real GPU; hide it with CUDA_VISIBLE_DEVICES='' before torch is imported")
    _require_platform()
    if _KEPT:
        return
    _require_order()
    c10, aten = (_library(name) for name in ("libc10.so", "libtorch_cpu.so"))
    _put_guard(c10)
    _say_available(aten)
    _check()


def _require_platform() -> None:
    here = f"{sys.platform} on {platform.machine()}"
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
        raise NotHereError(f"a fake GPU needs Linux on x86-64 or ARM, and this is {here}; use a container or a virtual machine")


def _require_order() -> None:
    """Torch ships its headers: the functions must stand in the table as they are known to."""
    header = Path(torch.__file__).parent / "include/ATen/detail/AcceleratorHooksInterface.h"
    if not header.is_file():
        return
    functions = re.findall(r"virtual \w+ (\w+)\(", header.read_text(encoding="utf-8"))
    if functions[: len(_FIRST_FUNCTIONS)] != _FIRST_FUNCTIONS:
        raise _unknown("orders its accelerator's functions otherwise")


def _library(name: str) -> ctypes.CDLL:
    path = Path(torch.__file__).parent / "lib" / name
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        raise _unknown(f"has no {name}") from None


def _put_guard(c10: ctypes.CDLL) -> None:
    """Register torch's Python guard as CUDA's; the place through which it is registered gets back what it had."""
    try:
        registry = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(c10, _REGISTRY)
        register = torch._C._acc.register_python_privateuseone_device_guard
    except (ValueError, AttributeError) as error:
        raise _unknown(f"has no registry of device guards ({error})") from None
    before, guard = registry[_PRIVATE_USE_1], _Guard()
    register(guard)
    if registry[_PRIVATE_USE_1] == before:
        raise _unknown("keeps its device guards elsewhere")
    registry[_CUDA], registry[_PRIVATE_USE_1] = registry[_PRIVATE_USE_1], before
    _KEPT.append(guard)


def _say_available(aten: ctypes.CDLL) -> None:
    """Replace three functions of CUDA's hooks by one that always says 1."""
    try:
        hooks_of = aten[_GET_HOOKS]
    except AttributeError:
        raise _unknown("has no CUDA hooks") from None
    hooks_of.restype = ctypes.c_void_p
    hooks = hooks_of()
    table = ctypes.c_void_p.from_address(hooks).value or 0
    start = table - _BEFORE_TABLE * _POINTER
    entries = (ctypes.c_void_p * _ENTRIES)(*(ctypes.c_void_p * _ENTRIES).from_address(start))
    yes = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
    for entry in (_IS_BUILT, _IS_AVAILABLE, _HAS_PRIMARY_CONTEXT):
        entries[_BEFORE_TABLE + entry] = yes
    ctypes.c_void_p.from_address(hooks).value = ctypes.addressof(entries) + _BEFORE_TABLE * _POINTER
    _KEPT.append(entries)


def _check() -> None:
    found = torch._C._accelerator_getAccelerator()
    if found != torch.device("cuda"):
        raise _unknown(f"says that its accelerator is {found}")


def _unknown(what: str) -> NotHereError:
    return NotHereError(
        f"torch {torch.__version__} {what}, so no GPU can be left out with it; known are 2.11 to 2.15 as their makers build them"
    )
