"""What it runs on: one accelerator and how many of them share a node."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from zeroplan.errors import SpecError
from zeroplan.spec.base import Count, Range, Spec

Dtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(Spec):
    """One published figure with its provenance."""

    value: Annotated[float, Range(1e-9, 1e20)]
    source: str
    """Document and table, or public thread."""
    as_of: str = ""
    """Date of that source, as exactly as it is known: ``2023``, ``2025-05-16``."""
    note: str = ""
    check: dict[str, float] | None = None
    """Factors whose product is the figure, where it can be derived: units, FMA per clock, FLOP per FMA, clock."""

    def check_rules(self) -> None:
        """Refuse a figure that nobody vouches for."""
        if not self.source.strip():
            raise SpecError(f"the figure {self.value} has no source; name the document and table")
        if self.check is not None and not all(factor > 0 for factor in self.check.values()):
            raise SpecError(f"check={self.check} of the figure {self.value} has a factor that is not positive")

    def __hash__(self) -> int:
        """Leave out ``check``: a dict has no hash."""
        return hash((self.value, self.source))


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteFigure(Figure):
    """A published size in whole bytes."""

    value: Count

    __hash__ = Figure.__hash__


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec(Spec):
    """One accelerator. Rates are per device; link rates are per direction."""

    name: str
    """Its name in the catalogue."""
    full_name: str
    """Its name in answers."""
    vendor: Literal["nvidia", "amd"]
    """Who makes it."""
    architecture: str
    """Its generation: ``Hopper``, ``CDNA 3``."""
    compute_capability: str
    """``9.0`` for NVIDIA, ``gfx942`` for AMD."""
    released: Annotated[int, Range(1990, 2999)]
    """Year."""
    aliases: tuple[str, ...] = ()
    """Other names it is found by."""
    gpus_per_node: Annotated[int, Range(1, 1024)] = 8
    """GPUs of the usual server or fast-interconnect domain."""
    marketing_memory_gb: Figure
    """The number on the box."""
    memory_bytes: ByteFigure
    """What ``torch.cuda.get_device_properties(0).total_memory`` reports, without ECC's and the firmware's part."""
    memory_bandwidth_bytes_per_s: Figure
    """Peak of its memory."""
    dense_flops_per_s: dict[Dtype, Figure]
    """Peak of matrix multiplications without sparsity, by operand dtype; fp16, bf16 and narrower accumulate in fp32."""
    node_link: str
    """What connects all GPUs of a node: ``NVLink 4``, ``PCIe 4.0 x16``; a bridge that only joins pairs does not."""
    node_link_bytes_per_s: Figure
    """Per GPU and direction."""
    network_link: str = ""
    """What connects nodes, in the vendor's reference server."""
    network_link_bytes_per_s: Figure | None = None
    """Per GPU, between nodes, in the vendor's reference server."""

    def check_rules(self) -> None:
        """Refuse an accelerator that computes nothing, or in no known way."""
        if self.vendor == "nvidia" and not re.fullmatch(r"[0-9]{1,2}\.[0-9]", self.compute_capability):
            raise SpecError(
                f"compute_capability={self.compute_capability!r} of an NVIDIA GPU is not like '9.0'; write its number"
            )
        if not self.dense_flops_per_s:
            raise SpecError("dense_flops_per_s is empty; give at least one dtype's peak")

    def __hash__(self) -> int:
        """Leave out the table of rates: a dict has no hash."""
        return hash((self.name, self.memory_bytes.value))


_Share = Annotated[float, Range(0.001, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesSpec(Spec):
    """What a measured step reached of the data sheet's rates, in place of the fitted shares, and where that was."""

    matrices: _Share
    """Of the dense peak, in matrix multiplications."""
    attention: _Share
    """Of the dense peak, in a fused causal attention kernel."""
    bandwidth: _Share
    """Of the memory's bandwidth, in operators that are bound by it."""
    stepping: _Share
    """Of the memory's bandwidth, in the optimizer's step."""
    source: str
    """The run, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec(Spec):
    """The GPU, if one is named, and how many share a node."""

    gpu: GpuSpec | None = None
    """The accelerator; None where only the need is asked for."""
    gpus_per_node: Count | None = None
    """How many share a node; None for the accelerator's usual server."""
    shares: SharesSpec | None = None
    """What a step measured there reached of its rates; None for the fitted shares."""


def node_size(cluster: ClusterSpec) -> int | None:
    """How many GPUs share a node: as said, or as in the GPU's usual server; None where neither is known.

    >>> node_size(ClusterSpec()), node_size(ClusterSpec(gpus_per_node=4))
    (None, 4)
    """
    return cluster.gpus_per_node or (None if cluster.gpu is None else cluster.gpu.gpus_per_node)
