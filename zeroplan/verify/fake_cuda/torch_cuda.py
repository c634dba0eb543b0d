"""Replaces every function of ``torch.cuda`` and ``torch.accelerator`` that scripts and libraries call on a GPU machine.

The replacements stay until the process ends, so use a separate process.
"""

import types
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zeroplan.spec.hardware import GpuSpec
from zeroplan.verify.fake_cuda import cpp, graphs
from zeroplan.verify.fake_cuda.memory import Memory
from zeroplan.verify.fake_cuda.streams import Event, Stream, default_stream
from zeroplan.verify.replaced import always, put

_REALLY_BUILT = torch.version.cuda is not None
_CUDA_VERSION = torch.version.cuda or "12.8"
"""A CUDA build reports its own version: torchvision refuses any other."""
_NCCL_VERSION = (2, 27, 3)
_STATE_BYTES = 16
"""The size of a CUDA random generator's state: a seed and an offset."""


class Gpus(NamedTuple):
    """The GPUs that this process sees: kind, number, its own index, and its own GPU's memory."""

    gpu: GpuSpec
    ranks: int
    local_rank: int
    memory: Memory


def patch_torch_cuda(gpus: Gpus) -> None:
    """Make ``torch.cuda`` and ``torch.accelerator`` answer for these GPUs."""
    torch.cpu._default_cpu_stream = torch.cpu._current_stream = default_stream()
    answers = _constants(gpus) | _device(gpus) | _streams() | _memory(gpus.memory) | _random(gpus.ranks)
    for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        for name, answer in answers.items():
            if owner is torch.cuda or hasattr(owner, name):
                setattr(owner, name, answer)
    for name in _OF_ANY_ACCELERATOR:
        setattr(torch.accelerator, name, answers[name])
    _accelerator(answers)
    _patch_other_modules()
    _generators()


_OF_ANY_ACCELERATOR = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats", "memory_stats",
    "synchronize", "empty_cache", "current_stream", "device_count",
)  # fmt: skip


def _constants(gpus: Gpus) -> dict[str, Callable[..., object]]:
    gpu, properties = gpus.gpu, _properties(gpus.gpu)
    capability = (properties.major, properties.minor)
    answers = {
        "is_available": True, "is_initialized": True, "device_count": gpus.ranks, "_device_count_nvml": gpus.ranks,
        "_lazy_init": None, "init": None, "_is_in_bad_fork": False, "get_device_name": gpu.full_name,
        "get_device_capability": capability, "get_device_properties": properties, "_get_device_properties": properties,
        "is_tf32_supported": capability >= (8, 0), "get_arch_list": [f"sm_{capability[0]}{capability[1]}"],
        "can_device_access_peer": True, "synchronize": None, "ipc_collect": None,
        "set_per_process_memory_fraction": None, "utilization": 0, "temperature": 0, "power_draw": 0, "clock_rate": 0,
        "memory_snapshot": [], "get_sync_debug_mode": 0, "set_sync_debug_mode": None,
        "reset_accumulated_memory_stats": None, "reset_accumulated_host_memory_stats": None, "_sleep": None,
    }  # fmt: skip
    made = {name: always(answer) for name, answer in answers.items()}
    return made | {"is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0)}


def _properties(gpu: GpuSpec) -> types.SimpleNamespace:
    major, minor = map(int, gpu.compute_capability.split("."))
    return types.SimpleNamespace(
        name=gpu.full_name, major=major, minor=minor, total_memory=int(gpu.memory_bytes.value), multi_processor_count=132,
        is_integrated=0, is_multi_gpu_board=0, warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        L2_cache_size=52428800, gcnArchName="", uuid="GPU-0", pci_bus_id=0, pci_device_id=0, pci_domain_id=0,
    )  # fmt: skip


def _device(gpus: Gpus) -> dict[str, Callable[..., object]]:
    current = [gpus.local_rank]
    cpp.set_current_device(gpus.local_rank)

    def set_device(device: torch.device | int | str) -> None:
        index = device if isinstance(device, int) else cast("int | None", torch.device(device).index)
        current[0] = current[0] if index is None or index < 0 else index
        cpp.set_current_device(current[0])

    return {"current_device": lambda: current[0], "set_device": set_device}


def _streams() -> dict[str, Callable[..., object]]:
    return {
        "Stream": Stream, "ExternalStream": Stream, "Event": Event, "stream": torch.cpu.stream,
        "StreamContext": torch.cpu.StreamContext, "current_stream": torch.cpu.current_stream, "set_stream": _set_stream,
        "default_stream": lambda *_: torch.cpu._default_cpu_stream, **_GRAPHS,
    }  # fmt: skip


_GRAPHS: dict[str, Callable[..., object]] = {
    "CUDAGraph": graphs.Graph, "graph_pool_handle": graphs.graph_pool_handle, "is_current_stream_capturing": graphs.is_capturing,
}  # fmt: skip
"""The parts of ``torch.cuda.graph`` and ``make_graphed_callables``, which are torch's own."""


def _set_stream(stream: Stream) -> None:
    torch.cpu._current_stream = stream


def _memory(memory: Memory) -> dict[str, Callable[..., object]]:
    return {
        "memory_allocated": memory.allocated, "max_memory_allocated": memory.most_allocated,
        "memory_reserved": memory.reserved, "max_memory_reserved": memory.most_reserved,
        "memory_cached": memory.reserved, "max_memory_cached": memory.most_reserved,
        "reset_peak_memory_stats": memory.reset_peak, "reset_max_memory_allocated": memory.reset_peak,
        "reset_max_memory_cached": memory.reset_peak, "memory_stats": memory.stats, "mem_get_info": memory.info,
        "empty_cache": memory.empty_cache, "_record_memory_history": always(None), "_dump_snapshot": always(None),
    }  # fmt: skip


def _state(*_: object, **__: object) -> torch.Tensor:
    with unset_fake_temporarily():
        return torch.zeros(_STATE_BYTES, dtype=torch.uint8)


class CudaGenerator(torch.Generator):
    """A GPU's generator: the host's with a state of CUDA's size. Its numbers affect no size."""

    get_state = _state
    device = property(always(torch.device("cuda")))

    def set_state(self, _: object) -> "CudaGenerator":
        """Do nothing: the host's state has another size."""
        return self

    graphsafe_set_state = set_state  # type: ignore[assignment]  # torch's takes a generator

    def clone_state(self) -> "CudaGenerator":
        """A generator in the same state."""
        return CudaGenerator()

    graphsafe_get_state = clone_state


def _random(count: int) -> dict[str, Callable[..., object]]:
    nothing = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
    found: dict[str, Callable[..., object]] = {
        "initial_seed": always(0), "get_rng_state": _state,
        "get_rng_state_all": lambda: [_state() for _ in range(count)],
        "default_generators": tuple(CudaGenerator() for _ in range(count)),  # type: ignore[dict-item]  # no function, but an answer
    }  # fmt: skip
    return found | {name: always(None) for name in nothing}  # separate functions: Dynamo has one rule per function


def _accelerator(answers: dict[str, Callable[..., object]]) -> None:
    accelerator = torch.accelerator
    for name, like in (
        ("current_device_index", "current_device"), ("current_device_idx", "current_device"), ("set_device_index", "set_device"),
        ("set_device_idx", "set_device"), ("set_stream", "set_stream"), ("get_memory_info", "mem_get_info"),
    ):  # fmt: skip
        setattr(accelerator, name, answers[like])


def _patch_other_modules() -> None:
    cuda = torch.cuda
    put(cuda.amp.common, amp_definitely_not_available=always(False))
    put(cuda.nccl, version=always(_NCCL_VERSION))
    put(cuda.nvtx, **dict.fromkeys(("range_push", "range_pop", "mark", "range_start", "range_end"), always(None)))
    put(cuda.graphs, **_GRAPHS)
    put(cuda.device, __init__=_choose, __enter__=always(None), __exit__=always(False))
    put(dist.Logger, set_runtime_stats_and_log=always(None))  # type: ignore[attr-defined]  # DDP's C++ timer would need CUDA
    if _REALLY_BUILT:
        put(Reducer, prepare_for_forward=always(None))  # a CUDA build would time with real events
    put(fake_tensor, init_gpu_context=always(None))  # torch 2.11 would make a real CUDA tensor
    put(torch.version, cuda=_CUDA_VERSION)
    put(torch.backends.cuda, is_built=always(True))
    torch._C._cuda_getCurrentRawStream = always(0)  # libraries import it; CPU builds lack it
    for name in (
        "_cuda_CUDAAllocator_AllocatorState",
        "_set_cached_tensors_enabled",
        "_host_emptyCache",
    ):  # likewise, for CUDA graphs
        if not hasattr(torch._C, name):
            setattr(torch._C, name, always(None))


def _choose(chosen: "torch.cuda.device", device: object) -> None:  # noqa: ARG001
    chosen.idx = 0


@cache
def _generators() -> None:
    """Make ``torch.Generator("cuda")`` return the CPU's with a GPU's state."""
    real = torch.Generator

    class Kind(type):
        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, real)

    class Generator(metaclass=Kind):
        def __new__(cls, device: "torch.device | str | int" = "cpu") -> torch.Generator:  # type: ignore[misc]
            return real() if torch.device(device).type == "cpu" else CudaGenerator()

    put(torch, Generator=Generator)
