"""How much GPU memory do library workspaces, the CUDA context and communicators use beside an engine's tensors?

The caching allocator provides the workspaces, so ``memory_allocated`` and the peak include them. The context and the
communicators are outside the allocator. No formula gives their exact size, so each is a band with the public figures behind it.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from zeroplan.engines.device_figures import band_of, of_gpu, sources
from zeroplan.engines.formulas import sized
from zeroplan.ledger import Band, Kind, Line
from zeroplan.numeric import Int, added_up, maximum, where
from zeroplan.spec.hardware import GpuSpec
from zeroplan.spec.mesh import Mesh, MeshSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.units import KIB, MB, MIB

_WORKSPACE_SOURCE = "torch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize"
#: One workspace and its formula: two blocks of 4096 KiB and eight of 16 KiB, or a number of MiB.
_WORKSPACE_BEFORE_HOPPER = (2 * 4096 + 8 * 16) * KIB, "(2·4096 + 8·16)·1024"
_WORKSPACE_SINCE_HOPPER = 32 * MIB, "32·1024²"
_WORKSPACE_ROCM = {"gfx94": (128 * MIB, "128·1024²"), "gfx95": (128 * MIB, "128·1024²")}
_WORKSPACE_ROCM_DEFAULT = 32 * MIB, "32·1024²"
_TRANSFORMER_ENGINE_SOURCE = "Transformer Engine 2026-08, pytorch/cpp_extensions/gemm.py, get_cublas_workspace"
_TRANSFORMER_ENGINE_BEFORE_HOPPER = 4 * MIB, "4·1024²"
_TRANSFORMER_ENGINE_SINCE_HOPPER = 32 * MIB + KIB, "(32·1024² + 1024)"
#: Number of streams for experts' products (Transformer Engine, common/util/multi_stream.cpp, get_num_compute_streams).
_EXPERT_STREAMS = 4
#: The forward's thread and autograd's thread each have a handle, and each handle has a workspace.
_HANDLES = 2


class Outside(NamedTuple):
    """GPU memory that the caching allocator does not see."""

    what: str
    band: Band
    source: str


#: CUDA loads kernels lazily since 11.7, so the context grows with the kernels that a job uses.
_CONTEXT = Outside(
    "CUDA context and loaded kernels",
    Band(300 * MB, 540 * MB, 900 * MB),
    "pytorch issues 107667 (about 300 MB) and 81257 (about 540 MB), 28113 (up to 700 MB); "
    "817 to 890 MB on an H100 in zeroplan's records",
)
_COMMUNICATOR = Outside(
    "one NCCL communicator",
    Band(300 * MB, 520 * MB, 1_300 * MB),
    "nccl issues 1685 (1.06 GB on 8 H100 with the context) and 864 (1.6 GB with the context)",
)


def workspace_lines(recipe: RecipeSpec, gpu: GpuSpec | None, *, experts: bool = False) -> tuple[Line, ...]:
    """Return the workspaces that libraries keep from their first matrix multiplication on; none for engine ``paper``. [bytes]

    >>> [line.n_bytes // MIB for line in workspace_lines(RecipeSpec(engine="megatron", zero_stage=1), None, experts=True)]
    [64, 160]
    """
    if recipe.engine == "paper":
        return ()
    if "te-linear" in recipe.fused_parts or "te-experts" in recipe.fused_parts:
        return workspace_line(gpu), transformer_engine_line(gpu, experts="te-experts" in recipe.fused_parts)
    if recipe.engine != "megatron" or recipe.megatron.transformer_impl == "local":
        return (workspace_line(gpu),)
    return workspace_line(gpu), transformer_engine_line(gpu, experts=experts and recipe.megatron.moe_grouped_gemm)


def transformer_engine_line(gpu: GpuSpec | None, *, experts: bool) -> Line:
    """Return Transformer Engine's own cuBLAS workspace, and one per expert stream. [bytes]

    Leaves out user buffers (``--tp-comm-overlap``). Without a named GPU it assumes Hopper or Blackwell.
    """
    since_hopper = gpu is None or (gpu.vendor == "nvidia" and float(gpu.compute_capability) >= 9)
    n_bytes, formula = _TRANSFORMER_ENGINE_SINCE_HOPPER if since_hopper else _TRANSFORMER_ENGINE_BEFORE_HOPPER
    count = 1 + _EXPERT_STREAMS if experts else 1
    reason = "Transformer Engine's own workspace" + (f", and {_EXPERT_STREAMS} for experts" if experts else "")
    return sized(Kind.WORKSPACE, count, n_bytes, reason, _TRANSFORMER_ENGINE_SOURCE, formula)


def workspace_line(gpu: GpuSpec | None) -> Line:
    """Return the workspace that cuBLAS (or hipBLAS) keeps from the first matrix multiplication on. [bytes]

    Without a named GPU it assumes Hopper or Blackwell, the largest of NVIDIA's. Leaves out ``CUBLAS_WORKSPACE_CONFIG``.

    >>> workspace_line(None).n_bytes == 2 * 32 * MIB
    True
    """
    reason = "cuBLAS workspaces, one for the forward thread and one for autograd's"
    seen = () if gpu is None else of_gpu("workspace", gpu.name)
    if seen:
        n_bytes = int(band_of(seen).expected_bytes)
        return sized(Kind.WORKSPACE, _HANDLES, n_bytes, reason, sources(seen))
    n_bytes, formula = workspace(gpu)
    return sized(Kind.WORKSPACE, _HANDLES, n_bytes, reason, _WORKSPACE_SOURCE, formula)


def workspace(gpu: GpuSpec | None) -> tuple[int, str]:
    """Return the size of one handle's workspace by torch's source, and its formula. [bytes]"""
    if gpu is None:
        return _WORKSPACE_SINCE_HOPPER
    if gpu.vendor == "amd":
        return _WORKSPACE_ROCM.get(gpu.compute_capability[:5], _WORKSPACE_ROCM_DEFAULT)
    return _WORKSPACE_SINCE_HOPPER if float(gpu.compute_capability) >= 9 else _WORKSPACE_BEFORE_HOPPER


def configured_workspace(environment: Mapping[str, str], gpu: GpuSpec | None) -> int:
    """Return the size of one handle's workspace under ``CUBLAS_WORKSPACE_CONFIG``, else torch's default. [bytes]

    ``parseChosenWorkspaceSize`` reads pairs of a size in KiB and a count. A text that it cannot parse gives the default.

    >>> configured_workspace({"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, None) // KIB
    8320
    """
    setting = environment.get("CUBLAS_WORKSPACE_CONFIG", "")
    if (gpu is not None and gpu.vendor == "amd") or not re.fullmatch(r"(:\d+:\d+)+", setting):
        return workspace(gpu)[0]
    return sum(int(size) * int(count) * KIB for size, count in re.findall(r":(\d+):(\d+)", setting))


def outside(mesh: MeshSpec, gpu: GpuSpec | None = None) -> tuple[Outside, ...]:
    """Return the GPU memory outside the caching allocator: the context, and a communicator per process group. [bytes]

    There is one group for the shards, one for replicas, one for each way to split the model, and two for experts; none with a
    single rank. Figures seen on this GPU (``device_figures.toml``) replace the general bands. The general bands are third-party
    reports, except the context's upper end, which is from zeroplan's own records on an H100.

    >>> [len(outside(MeshSpec(dp_shard=ranks))) for ranks in (1, 8)]
    [1, 2]
    """
    return outside_beside(int(communicators(mesh)), "" if gpu is None else gpu.name)


def communicators(mesh: Mesh) -> Int:
    """Return the number of process groups of a rank.

    >>> communicators(MeshSpec(dp_shard=4, tp=2))
    2
    """
    same_experts = where(mesh.ep > 1, mesh.dp_shard * mesh.cp * mesh.tp // mesh.ep, 1)
    degrees = mesh.dp_shard, mesh.dp_replicate, mesh.tp, mesh.cp, mesh.pp, mesh.ep, same_experts
    return added_up(where(degree > 1, 1, 0) for degree in degrees)


@cache
def outside_beside(groups: int, gpu: str) -> tuple[Outside, ...]:
    """Return the same for this many process groups on a named GPU. [bytes]"""
    context, communicator = _context(gpu), _communicator(gpu)
    if not groups:
        return (context,)
    band = Band(*(groups * n_bytes for n_bytes in communicator.band))
    what = communicator.what if groups == 1 else f"{groups} NCCL communicators"
    return (context, communicator._replace(what=what, band=band))


def _context(gpu: str) -> Outside:
    """Return context and kernels: the figure seen for both, or a band whose lower end is the figure for the context alone."""
    process = of_gpu("process", gpu) if gpu else ()
    if process:
        return _CONTEXT._replace(band=band_of(process), source=sources(process))
    alone = of_gpu("context", gpu) if gpu else ()
    if not alone:
        return _CONTEXT
    low, expected, high = band_of(alone)
    general = _CONTEXT.band
    band = Band(low, max(int(expected), int(general.expected_bytes)), max(int(high), int(general.high_bytes)))
    return _CONTEXT._replace(band=band, source=f"{sources(alone)}; with kernels: {_CONTEXT.source}")


def _communicator(gpu: str) -> Outside:
    seen = of_gpu("communicator", gpu) if gpu else ()
    return _COMMUNICATOR._replace(band=band_of(seen), source=sources(seen)) if seen else _COMMUNICATOR


def allocator_room(mesh: MeshSpec, gpu: GpuSpec | None) -> int | None:
    """Return the memory that a GPU has for the caching allocator, after the expected context and communicators. [bytes]

    >>> allocator_room(MeshSpec(dp_shard=8), None) is None
    True
    """
    if gpu is None:
        return None
    return int(gpu.memory_bytes.value) - int(total_band(outside(mesh, gpu)).expected_bytes)


def reserved_as_seen(band: Band, engine: str, gpu: GpuSpec | None) -> Band:
    """Return the allocator's reserve, corrected by the ratio to the expected reserve that was seen on this GPU. [bytes]

    It is at least the lower end. The upper end stays, unless the expected value exceeds it.
    """
    seen = () if gpu is None else of_gpu("reserved", gpu.name, engine)
    if not seen:
        return band
    thousandths = int(band_of(seen).expected_bytes)
    expected = maximum(band.low_bytes, band.expected_bytes * thousandths // 1000)
    return Band(band.low_bytes, expected, maximum(expected, band.high_bytes))


def total_band(parts: tuple[Outside, ...]) -> Band:
    """Return the sum of the bands. [bytes]

    >>> total_band(outside(MeshSpec())).low_bytes
    300000000
    """
    return Band(*(sum(figures) for figures in zip(*(part.band for part in parts), strict=True)))
