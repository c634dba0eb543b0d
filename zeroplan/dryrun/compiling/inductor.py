"""Runs inductor without a GPU: it lowers, fuses, plans buffers and writes its program as on a GPU; the program then runs.

The program allocates its buffers by the same calls as on a GPU, and calls libraries' kernels as torch's operators. Its own Triton
kernels are neither built nor launched, so Triton need not be installed.

Source: torch 2.13, ``torch/_inductor``: ``graph.py`` (``GraphLowering._compile_to_module_lines``), ``async_compile.py``,
``scheduler.py`` (``create_backend``), ``codegen/wrapper.py`` (the names that a program imports from ``torch._C._dynamo.guards``).
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from zeroplan.dryrun.replacements import note
from zeroplan.dryrun.watcher import ScriptTracker
from zeroplan.verify.fake_cuda.known_values import forget
from zeroplan.verify.replaced import always, put

_HOST = torch.device("cpu")
_PLANNED = ("torch.compile's own kernels", "inductor plans their buffers, and they are not launched")
_ON_THE_HOST = ("torch.compile's kernels on the host", "not run, so their results are unknown")
_MUTATED = re.compile(r"'mutated_arg_names': \[([^\]]*)\]")
_LIBRARIES: list[torch.library.Library] = []
"""Keeps the registered kernels alive."""
_COMPILING = [0]
"""The number of running compilations, since one may begin within another."""


@contextmanager
def compiling() -> Iterator[None]:
    """Mark a running compilation, in which inductor's constants are made on the host."""
    import torch._inductor.config as inductor_config  # noqa: PLC0415

    settings = {"triton.cudagraphs": False, "max_autotune": False, "max_autotune_gemm": False, "max_autotune_pointwise": False}
    _COMPILING[0] += 1
    try:
        with inductor_config.patch(settings):
            yield
    finally:
        _COMPILING[0] -= 1


@cache
def plan_without_a_gpu(tracker: ScriptTracker) -> None:
    """Make inductor plan for the fake GPU, for the rest of the process."""
    _fold_constants_on_the_host()
    _multiply_into_given_tensors()
    _compile_unwatched()
    _write_without_triton()
    _launch_nothing()
    _run_on_fake_tensors()
    _learn_origins(tracker)


def _fold_constants_on_the_host() -> None:
    """Register CUDA kernels that make constants on the host, where inductor folds them."""

    def empty(size: Any, *, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:  # noqa: ANN401
        return torch.empty(_folded(size), dtype=dtype, device=_HOST)

    def empty_strided(size: Any, stride: Any, *, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:  # noqa: ANN401
        return torch.empty_strided(_folded(size), stride, dtype=dtype, device=_HOST)

    _register("CUDA", {"empty.memory_format": empty, "empty_strided": empty_strided})


def _register(key: str, kernels: Mapping[str, Callable[..., object]]) -> None:
    """Register kernels of torch's own operators for a dispatch key, for the rest of the process."""
    library = torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
    for name, kernel in kernels.items():
        library.impl(name, kernel)  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)


def _multiply_into_given_tensors() -> None:
    """Register the float8 product that writes into a given tensor, as inductor calls it; torch 2.13 has no shapes for it."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm.out", "Meta"):
        _register("Meta", {"_scaled_mm.out": lambda *_, out, **__: out})


def _folded(size: Any) -> Any:  # noqa: ANN401  a shape, as torch has it
    if not _COMPILING[0]:
        raise AssertionError("a tensor on the fake GPU has bytes; all tensors there must be fake")
    return size


def _compile_unwatched() -> None:
    """Turn dispatch modes off during compilation: torch may compile a backward at its first run, inside them."""
    from torch._functorch import partitioners  # noqa: PLC0415
    from torch._inductor import compile_fx  # noqa: PLC0415

    compile_graph = compile_fx._compile_fx_inner

    def unwatched(*args: object, **kwargs: object) -> object:
        with _disable_current_modes(), compiling():
            return compile_graph(*args, **kwargs)  # type: ignore[arg-type]

    put(compile_fx, _compile_fx_inner=unwatched)
    # These store generator states for recomputation: a few bytes on the host.
    put(partitioners, functionalize_rng_ops=lambda _joint, forward, backward, *_: (forward, backward))


def _write_without_triton() -> None:
    """Let inductor and its programs run without Triton."""
    import torch.utils._triton as about_triton  # noqa: PLC0415
    from torch._inductor import codecache, scheduler  # noqa: PLC0415

    put(scheduler, has_triton=always(True))
    put(about_triton, triton_hash_with_backend=always(""))
    load = codecache.PyCodeCache.load_by_key_path

    def loaded(*args: Any, **kwargs: Any) -> ModuleType:  # noqa: ANN401
        with _triton_by_name():
            return load(*args, **kwargs)

    put(codecache.PyCodeCache, load_by_key_path=loaded)


@contextmanager
def _triton_by_name() -> Iterator[None]:
    """While a program is imported, provide an empty module named triton if Triton is not installed."""
    try:
        import triton  # noqa: F401, PLC0415
    except ImportError:
        named = {name: ModuleType(name) for name in ("triton", "triton.language")}
        named["triton"].language = named["triton.language"]  # type: ignore[attr-defined]
        sys.modules.update(named)
        try:
            yield
        finally:
            for name in named:
                del sys.modules[name]
        return
    yield


class _Kernel:
    """Replaces an inductor kernel; the values that the kernel would write become unknown."""

    def __init__(self, name: str, source: str) -> None:
        arguments = re.search(rf"def {re.escape(name)}\(([^)]*)\)", source)
        mutated = _MUTATED.search(source)
        names = [one.partition(":")[0].strip() for one in arguments[1].split(",")] if arguments else []
        self._written = [at for at, one in enumerate(names) if mutated and f"'{one}'" in mutated[1]]
        self._note = _PLANNED

    def run(self, *args: object, **_: object) -> None:
        """Count the launch, and mark the written values as unknown."""
        note(*self._note)
        for at in self._written:
            if isinstance(one := args[at], torch.Tensor):
                forget(one)


def _launch_nothing() -> None:
    from torch._inductor import async_compile  # noqa: PLC0415

    def on_the_host(*_: object, **__: object) -> Callable[..., None]:
        return lambda *_: note(*_ON_THE_HOST)

    put(
        async_compile.AsyncCompile,
        triton=lambda _, name, source, *__, **___: _Kernel(name, source),
        cpp=on_the_host,
        cpp_pybinding=on_the_host,
    )


def _run_on_fake_tensors() -> None:
    """Replace the C++ functions of a program for tensors without addresses."""
    guards: Any = torch._C._dynamo.guards

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN401
        return torch.empty_strided(size, stride, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device()))

    def reinterpreted(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:  # noqa: ANN401
        with torch.no_grad():
            return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    put(guards, _empty_strided_cuda=empty, _reinterpret_tensor=reinterpreted, copy_if_misaligned=lambda tensor: tensor)
    put(torch.cuda, _DeviceGuard=lambda _: nullcontext())


def _learn_origins(tracker: ScriptTracker) -> None:
    """Pass inductor's map from program lines to graph nodes to the tracker."""
    from torch._inductor.graph import GraphLowering  # noqa: PLC0415

    write = GraphLowering._compile_to_module_lines

    def written(graph: GraphLowering, code: Any) -> object:  # noqa: ANN401
        program = write(graph, code)
        tracker.learn_program(graph.cache_path, code.line_map)
        return program

    put(GraphLowering, _compile_to_module_lines=written)
