"""Lets transformers run linear attention by the kernels of fla, mamba_ssm and causal-conv1d on the fake GPU.

The three packages allocate in Python and pass the tensors to kernels. Here a kernel does nothing: a stand-in for Triton returns
launchers that do nothing, and the modules written in C++ are empty. Everything else is the packages' own code. transformers
chooses the kernels when it is imported, so this needs a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

#: What the kernels need of Triton and of C++; submodules are found by their parent's name.
_STAND_INS = ("triton", "causal_conv1d_cuda", "selective_scan_cuda")


_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")
_USED = ("fla.ops.gated_delta_rule", "fla.ops.kda", "causal_conv1d", "mamba_ssm.ops.triton.ssd_combined")


def installed() -> bool:
    """Whether the packages are installed, which needs no compiler and no GPU."""
    return all(importlib.util.find_spec(name) is not None for name in _PACKAGES)


@cache
def install_kernels() -> None:
    """Let later imports of transformers find the packages; call it on the fake GPU, before transformers is imported."""
    sys.meta_path.insert(0, _Finder())
    for name in _USED:
        importlib.import_module(name)  # transformers would pass over an error, and run its own operators
    importlib.import_module("causal_conv1d.cpp_functions")._causal_conv1d_bwd_cpp = _copy_in_order


def _copy_in_order(*, x: Tensor, dout: Tensor, **_: object) -> None:
    """Allocate as csrc/causal_conv1d.cpp, causal_conv1d_bwd does: a copy of a gradient in another order than the input."""
    channel_last = x.stride(1) == 1 and x.stride(2) > 1
    if channel_last and dout.stride(1) != 1:
        dout.transpose(-1, -2).contiguous()
    elif not channel_last and dout.stride(2) != 1:
        dout.contiguous()


def releases() -> dict[str, str]:
    """Return the installed releases."""
    return {name: importlib.import_module(name).__version__ for name in _PACKAGES}


class _Launcher:
    """A kernel: ``kernel[grid](...)`` does nothing. It keeps the decorated function, whose arguments the packages inspect."""

    def __init__(self, function: object) -> None:
        self.fn, self.arg_names = function, ()

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


class _Tuned:
    """``triton.runtime.autotuner.Autotuner``."""

    user_defined_pre_hook = user_defined_post_hook = True
    reset_to_zero = restore_value = ()

    def __init__(self, function: object, *_: object, **options: object) -> None:
        vars(self).update(options, fn=function, kwargs=function, arg_names=())

    @property
    def best_config(self) -> object:
        """The first configuration; it decides how much of a buffer is read, not its size."""
        return self.configs[0]

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


class _Anything:
    """A name of Triton that nothing reads the value of."""

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return (_Tuned,)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *arguments: object, **_: object) -> object:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else _Anything()

    def __getitem__(self, _: object) -> object:
        return _Anything()


class _StandIn(ModuleType):
    """A module that has every name. Those of classes are checked with ``isinstance`` and derived from."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Tuned if name[0].isupper() else _Anything()


class _Finder(MetaPathFinder, Loader):
    """Finds the stand-ins."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        whole = fullname.split(".", maxsplit=1)[0] in _STAND_INS and "gluon" not in fullname
        return ModuleSpec(fullname, self, is_package=True) if whole else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "triton":
            vars(module).update(
                __version__="3.7.1", jit=_jit, autotune=_autotune, heuristics=_as_it_is, cdiv=lambda a, b: -(-a // b),
                next_power_of_2=lambda n: 1 << (n - 1).bit_length(), runtime=_RUNTIME,
            )  # fmt: skip


#: Triton's answer which device it has.
_RUNTIME = _StandIn("triton.runtime")
_RUNTIME.driver = _StandIn("driver")  # type: ignore[attr-defined]
_RUNTIME.driver.active = SimpleNamespace(  # type: ignore[attr-defined]
    get_current_target=lambda: SimpleNamespace(backend="cuda", arch=90),
    utils=SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132}),
)


def _jit(function: object = None, **_: object) -> object:
    return _jit if function is None else _Launcher(function)


def _autotune(configs: object, **_: object) -> Callable[[object], object]:
    return lambda function: _Tuned(function, configs=configs)


def _as_it_is(*_: object, **__: object) -> Callable[[object], object]:
    return lambda function: function
