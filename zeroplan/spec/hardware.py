"""The hardware of a job: the accelerator, the number per node, and the network."""

import re
from typing import Annotated, Literal

from zeroplan.errors import SpecError
from zeroplan.spec.base import Count, Range, Spec

Kernels = Literal["cuda", "cuda-7", "cpu"]
"""``cuda-7``: a GPU before compute capability 8.0, for which torch has few attention kernels."""
AllocatorSettings = Literal["default", "expandable_segments"]
SETTINGS: tuple[AllocatorSettings, ...] = ("default", "expandable_segments")
"""The settings of CUDA's caching allocator (``PYTORCH_CUDA_ALLOC_CONF``)."""
Dtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]


class Figure(Spec):
    """One published figure with its source."""

    value: Annotated[float, Range(1e-9, 1e20)]
    source: str
    """Document and table, or public thread."""
    as_of: str = ""
    """The source's date, as precise as known: ``2023``, ``2025-05-16``."""
    note: str = ""
    check: dict[str, float] | None = None
    """Factors whose product is the figure, if it can be derived: units, FMA per clock, FLOP per FMA, clock."""

    def check_rules(self) -> None:
        """Raise SpecError for a figure without a source."""
        if not self.source.strip():
            raise SpecError(f"the figure {self.value} has no source; name the document and table")
        if self.check is not None and not all(factor > 0 for factor in self.check.values()):
            raise SpecError(f"check={self.check} of the figure {self.value} has a factor that is not positive")

    def __hash__(self) -> int:
        """Hash without ``check``: a dict has no hash."""
        return hash((self.value, self.source))


class ByteFigure(Figure):
    """A published size in whole bytes."""

    value: Count

    __hash__ = Figure.__hash__


class GpuSpec(Spec):
    """One accelerator. Rates are per device; link rates are per direction."""

    name: str
    """Its name in the catalogue."""
    full_name: str
    """Its name in answers."""
    vendor: Literal["nvidia", "amd"]
    """Its maker."""
    architecture: str
    """Its generation: ``Hopper``, ``CDNA 3``."""
    compute_capability: str
    """``9.0`` for NVIDIA, ``gfx942`` for AMD."""
    released: Annotated[int, Range(1990, 2999)]
    """Year."""
    aliases: tuple[str, ...] = ()
    """Other names under which it is found."""
    gpus_per_node: Annotated[int, Range(1, 1024)] = 8
    """GPUs of the usual server or fast-interconnect domain."""
    marketing_memory_gb: Figure
    """The advertised size."""
    memory_bytes: ByteFigure
    """``total_memory`` of ``torch.cuda.get_device_properties(0)``, which excludes ECC and firmware."""
    memory_bandwidth_bytes_per_s: Figure
    """Peak rate of its memory."""
    dense_flops_per_s: dict[Dtype, Figure]
    """Peak rates of matrix products without sparsity, by operand dtype; fp16, bf16 and narrower accumulate in fp32."""
    node_link: str
    """The link between all GPUs of a node: ``NVLink 4``, ``PCIe 4.0 x16``; not a bridge that only joins pairs."""
    node_link_bytes_per_s: Figure
    """Per GPU and direction."""
    network_link: str = ""
    """The link between nodes, in the vendor's reference server."""
    network_link_bytes_per_s: Figure | None = None
    """Per GPU, between nodes, in the vendor's reference server."""

    def check_rules(self) -> None:
        """Raise SpecError for an accelerator without rates, or with unknown ones."""
        if self.vendor == "nvidia" and not re.fullmatch(r"[0-9]{1,2}\.[0-9]", self.compute_capability):
            raise SpecError(
                f"compute_capability={self.compute_capability!r} of an NVIDIA GPU is not like '9.0'; write its number"
            )
        if not self.dense_flops_per_s:
            raise SpecError("dense_flops_per_s is empty; give at least one dtype's peak")

    def __hash__(self) -> int:
        """Hash without the table of rates: a dict has no hash."""
        return hash((self.name, self.memory_bytes.value))


_Share = Annotated[float, Range(0.001, 1)]
_OfMeasured = Annotated[float, Range(0.001, 1.5)]


class SharesSpec(Spec):
    """The shares of the data sheet's rates that a measured step reached. They replace the fitted shares."""

    matrices: _OfMeasured
    """Rate of its matrix products, divided by the rate of isolated products of the same shapes."""
    attention: _OfMeasured
    """The same for the fused attention kernel."""
    bandwidth: _Share
    """Share of the memory's bandwidth in memory-bound operators."""
    stepping: _OfMeasured
    """Share of the memory's bandwidth in the optimizer's step. Above 1, the bandwidth stays full and the CPU launches faster."""
    source: str
    """The run, in words."""


class ClusterSpec(Spec):
    """The GPU, if named, the number of GPUs per node, and the network between nodes."""

    gpu: GpuSpec | None = None
    """The accelerator; None to compute the needed memory without a verdict."""
    gpus_per_node: Count | None = None
    """GPUs per node; None for the accelerator's usual server."""
    network_gbit_per_s: Count | None = None
    """The rate of a network card per direction; None for the accelerator's usual server. [Gbit/s]"""
    nics_per_node: Count | None = None
    """Network cards of a node; None for one per GPU."""
    shares: SharesSpec | None = None
    """Shares of the rates that a measured step reached; None for the fitted shares."""

    @property
    def kernels(self) -> Kernels:
        """The attention kernels that torch has for the GPU: few before compute capability 8.0.

        Source: torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
        """
        gpu = self.gpu
        return "cuda-7" if gpu is not None and gpu.vendor == "nvidia" and float(gpu.compute_capability) < 8 else "cuda"


def node_size(cluster: ClusterSpec) -> int | None:
    """Return the GPUs per node: as given, or of the GPU's usual server; None if unknown.

    >>> node_size(ClusterSpec()), node_size(ClusterSpec(gpus_per_node=4))
    (None, 4)
    """
    return cluster.gpus_per_node or (None if cluster.gpu is None else cluster.gpu.gpus_per_node)


def network_bytes_per_s(cluster: ClusterSpec) -> float | None:
    """Return the network rate between nodes per GPU and direction; None if unknown. [bytes/s]

    >>> network_bytes_per_s(ClusterSpec())
    """
    gpu, per_node = cluster.gpu, node_size(cluster)
    if gpu is None or per_node is None:
        return None
    usual = gpu.network_link_bytes_per_s
    measured = cluster.network_gbit_per_s
    card = None if usual is None else float(usual.value)
    card = card if measured is None else measured * 1e9 / 8
    return None if card is None else card * (cluster.nics_per_node or per_node) / per_node
