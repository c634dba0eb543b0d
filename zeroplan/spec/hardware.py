"""What it runs on: one accelerator and how many of them share a node."""

from dataclasses import dataclass
from typing import Annotated, Literal

from zeroplan.spec.base import Count, Range, Spec

Dtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(Spec):
    """One published figure with its provenance."""

    value: Annotated[float, Range(1.0, 1e20)]
    source: str
    as_of: str = ""
    note: str = ""
    check: dict[str, float] | None = None
    """What the figure follows from, where it can be derived: units, operations per clock, clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec(Spec):
    """One accelerator.

    ``memory_bytes`` is what ``torch.cuda.get_device_properties(0).total_memory`` reports (ECC and firmware reserve taken
    off), ``marketing_memory_gb`` the number on the box. Rates are dense and per device; link rates are per direction.
    """

    name: str
    full_name: str
    vendor: Literal["nvidia", "amd"]
    architecture: str
    compute_capability: str
    """``9.0`` for NVIDIA, ``gfx942`` for AMD."""
    released: int
    aliases: tuple[str, ...] = ()
    gpus_per_node: Annotated[int, Range(1, 1024)] = 8
    """GPUs of the usual server or fast-interconnect domain."""
    marketing_memory_gb: Figure
    memory_bytes: Figure
    memory_bandwidth_bytes_per_s: Figure
    dense_flops_per_s: dict[Dtype, Figure]
    node_link: str
    """What connects the GPUs of a node: ``NVLink 4``, ``PCIe 4.0 x16``."""
    node_link_bytes_per_s: Figure
    network_link: str = ""
    network_link_bytes_per_s: Figure | None = None
    """Per GPU, between nodes, in the vendor's reference server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec(Spec):
    """The GPU, if one is named, and how many share a node."""

    gpu: GpuSpec | None = None
    gpus_per_node: Count | None = None
