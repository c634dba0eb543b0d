"""What it runs on: one accelerator and how many of them share a node."""

from typing import Annotated, Literal

from pydantic import Field

from zeroplan.spec.base import Count, Spec

Positive = Annotated[int | float, Field(gt=0, lt=1e20)]
Dtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]


class Figure(Spec):
    """One published figure with its provenance."""

    value: Positive
    source: Annotated[str, Field(min_length=1)]
    """Document and table, or public thread."""
    as_of: str = ""
    """Date of that source, as exactly as it is known: ``2023``, ``2025-05-16``."""
    note: str = ""
    check: dict[str, Positive] | None = None
    """Factors whose product is the figure, where it can be derived: units, FMA per clock, FLOP per FMA, clock."""

    def __hash__(self) -> int:
        """Leave out ``check``: a dict has no hash."""
        return hash((self.value, self.source))


class ByteFigure(Figure):
    """A published size in whole bytes."""

    value: Annotated[int, Field(gt=0, lt=10**15)]

    __hash__ = Figure.__hash__


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
    gpus_per_node: Annotated[int, Field(gt=0, le=1024)] = 8
    """GPUs of the usual server or fast-interconnect domain."""
    marketing_memory_gb: Figure
    memory_bytes: ByteFigure
    memory_bandwidth_bytes_per_s: Figure
    dense_flops_per_s: Annotated[dict[Dtype, Figure], Field(min_length=1)]
    """Peak of matrix multiplications without sparsity, by operand dtype; fp16, bf16 and narrower accumulate in fp32."""
    node_link: str
    """What connects all GPUs of a node: ``NVLink 4``, ``PCIe 4.0 x16``; a bridge that only joins pairs does not."""
    node_link_bytes_per_s: Figure
    network_link: str = ""
    network_link_bytes_per_s: Figure | None = None
    """Per GPU, between nodes, in the vendor's reference server."""

    def __hash__(self) -> int:
        """Leave out the table of rates: a dict has no hash."""
        return hash((self.name, self.memory_bytes.value))


class ClusterSpec(Spec):
    """The GPU, if one is named, and how many share a node."""

    gpu: GpuSpec | None = None
    gpus_per_node: Count | None = None
