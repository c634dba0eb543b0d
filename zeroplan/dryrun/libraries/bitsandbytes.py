"""bitsandbytes: operators return shapes, tables have real values, and the CUDA library is not loaded."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zeroplan.dryrun.patches import Patch
from zeroplan.dryrun.replacements import note, noting
from zeroplan.verify.replaced import always, put

_TABLES = ("create_dynamic_map", "create_fp8_map", "create_linear_map", "create_normal_map")


def _no_cuda_library(module: ModuleType) -> None:
    """Load the CPU library; the CUDA library needs NVIDIA's libraries (``cextension.py``, 0.50)."""
    put(module, get_cuda_specs=always(None))


def _library(module: ModuleType) -> None:
    """Make functions of the CUDA library do nothing: Unsloth's layers call them on existing tensors."""
    find: Callable[[object, str], Callable[..., object]] = module.BNBNativeLibrary.__getattr__
    nothing = noting("bitsandbytes' library for CUDA", "its functions are not run", always(None))

    def function(library: Any, name: str) -> Callable[..., object]:  # noqa: ANN401
        written = name.startswith(("cdequantize_", "cquantize_", "cgemm_")) and not hasattr(library._lib, name)
        return nothing if written else find(library, name)

    put(module.BNBNativeLibrary, __getattr__=function)


def _functional(module: ModuleType) -> None:
    put(module, **{name: _for_real(getattr(module, name)) for name in _TABLES if hasattr(module, name)})
    put(module, get_paged=_paged, fill=always(None), prefetch_tensor=always(None))


def _for_real(table: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make a table of constants with real values, since Python reads them."""

    def made(*args: object, **kwargs: object) -> torch.Tensor:
        with unset_fake_temporarily():
            return table(*args, **kwargs)

    return made


def _paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
    """Managed memory on the host, which torch's allocator does not count (``functional.py``, ``get_paged``, 0.50)."""
    note("bitsandbytes' paged optimizer states", "host memory; CUDA moves pages to the GPU while it has room")
    out = torch.empty(shape, dtype=dtype, device="cpu")
    vars(out).update(is_paged=True, page_deviceid=0 if device is None else device.index)
    return out


def _kernels(module: ModuleType) -> None:
    from zeroplan.verify.fake_parts import eight_bit_kernels, four_bit_kernels  # noqa: F401, PLC0415  they import bitsandbytes

    what = ("bitsandbytes' kernels", "their results' shapes, and the memory that they allocate through torch")
    beyond = (
        "values beyond the threshold of 8-bit layers",
        "every column has one, the upper limit; with llm_int8_threshold=0 none has",
    )
    product = noting(*what, module.matmul)

    def matmul(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        state = kwargs.get("state")
        if kwargs.get("threshold") or getattr(state, "threshold", 0):
            note(*beyond)
        return product(*args, **kwargs)

    put(module, matmul_4bit=noting(*what, module.matmul_4bit), matmul=matmul)


PATCHES: dict[str, Patch] = {
    "bitsandbytes.cuda_specs": _no_cuda_library,
    "bitsandbytes.cextension": _library,
    "bitsandbytes.functional": _functional,
    "bitsandbytes": _kernels,
}
