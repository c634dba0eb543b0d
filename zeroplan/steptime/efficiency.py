"""The rate of operators in a training step as a share of their rate when measured alone, with a source for each share.

Matrix products and attention take their time from products and kernels that were measured alone, by shape
(:mod:`zeroplan.steptime.tables`). Those kernels ran alone on a cool GPU; a training step draws more power for longer, and the GPU
lowers its clocks. The share of a step's products is fitted to the open half of published runs (``tests/measured/throughput.py``;
docs/plan.md has the errors of both halves).
"""

from typing import NamedTuple

from zeroplan.spec.hardware import ClusterSpec

_FITTED = "fitted to the open half of the published runs in tests/golden/published_throughput.jsonl"
_NOT_FITTED = "Hopper's, for want of published runs on this architecture"


class Efficiency(NamedTuple):
    """Shares of one architecture's rates, and their source."""

    matrices: float
    """Matrix products: share of the rate of products of the same shape measured alone."""
    attention: float
    """Fused attention: share of the kernel's rate measured alone."""
    bandwidth: float
    """Memory-bound operators: share of the memory's bandwidth."""
    source: str
    stepping: float | None = None
    """The optimizer's step, if measured apart: share of the memory's bandwidth, used up to 1. The CPU's launches there are faster
    by the same factor."""
    launching: float = 1.0
    """Speed of the CPU's launches relative to the usual CPU beside such a GPU."""

    def scaled(self, factor: float, *, stepping: float) -> "Efficiency":
        """Return the shares times ``factor``, and the optimizer's times ``stepping``; bandwidth stays within the data sheet."""
        matrices, attention = (min(factor * share, MOST) for share in (self.matrices, self.attention))
        bandwidth = min(factor * self.bandwidth, 1.0)
        stepped = min(stepping * (self.stepping or self.bandwidth), MOST)
        return Efficiency(matrices, attention, bandwidth, self.source, stepped, factor * self.launching)


_AMPERE = Efficiency(0.90, 1.0, 0.8, _FITTED)
_HOPPER = Efficiency(0.81, 1.0, 0.8, _FITTED)
#: Training's products alone reach 0.71 on a B200 (github.com/MooreThreads/SimuMax at 4dcaae51, configs/system).
_BLACKWELL = Efficiency(0.67, 1.0, 0.8, _FITTED)
#: Shares of products where the same chip may draw another power: 1,000 W on a B200, 1,200 W on a GB200 (NVIDIA's data sheets).
_BY_POWER = {"b200": 0.64, "gb200": 0.69}
#: Upper limit of the shares of products, attention and the optimizer's step.
MOST = 1.5
#: Products in fp8 and fp4 draw less power: their shares, fitted to the same runs. MXFP8 has a scale for every 32
#: elements. Blackwell Ultra may draw 1,400 W, Blackwell 1,000 or 1,200.
_NARROW = {
    ("Hopper", "fp8"): 0.90, ("Blackwell", "fp8"): 0.90, ("Blackwell", "mxfp8"): 0.85, ("Blackwell", "fp4"): 1.02,
    ("Blackwell Ultra", "fp8"): 0.95, ("Blackwell Ultra", "mxfp8"): 0.91, ("Blackwell Ultra", "fp4"): 1.14,
}  # fmt: skip
_EFFICIENCIES = {"Ampere": _AMPERE, "Hopper": _HOPPER, "Blackwell": _BLACKWELL, "Blackwell Ultra": _BLACKWELL}

#: Rate of NCCL's ring as a share of the links' rate: all-gather and reduce-scatter on eight H200, 361.4 and 362.9 of 450 GB/s;
#: all-reduce on eight A100, 235 of 300 GB/s, on eight B200 without NVLS 682 of 900 GB/s.
LINK_SHARE = 0.80
LINK_SOURCE = (
    "github.com/stas00/ml-engineering, network/README.md: all-gather 361, reduce-scatter 363 of 450 GB/s on 8 H200; "
    "taken for links between nodes too"
)

#: Host to device over PCIe: 55.4 of 64 GB/s.
PCIE_SHARE = 55.4 / 64
PCIE_SOURCE = "github.com/stas00/ml-engineering, network/README.md: 55.4 of 64 GB/s from host to device over PCIe 5.0 x16"
_PCIE_BYTES_PER_S = {3: 16e9, 4: 32e9, 5: 64e9}
_PCIE_OF = {"Pascal": 3, "Volta": 3, "Turing": 3, "Ampere": 4, "Ada Lovelace": 4, "CDNA": 4, "CDNA 2": 4}

#: Bandwidth of a node's host memory: two sockets with eight channels of DDR4-3200 each.
HOST_BYTES_PER_S = 2 * 8 * 3200e6 * 8
HOST_SOURCE = (
    "AMD EPYC 7002 series data sheet: eight channels of DDR4-3200, 204.8 GB/s per socket; two sockets, shared by the ranks"
)


def matrices_share(share: Efficiency, architecture: str, operands: str | None, gpu: str = "") -> float:
    """Return the share of products in a dtype."""
    narrow = _NARROW.get((architecture, operands or ""))
    return share.matrices if narrow is None else share.matrices * narrow / efficiency(architecture, gpu).matrices


def efficiency(architecture: str, gpu: str = "") -> Efficiency:
    """Return the shares of an architecture, or of one of its GPUs by name.

    >>> efficiency("Blackwell").matrices, efficiency("Blackwell", "gb200-186gb").matrices
    (0.67, 0.69)
    """
    usual = _EFFICIENCIES.get(architecture, _HOPPER._replace(source=_NOT_FITTED))
    return usual._replace(matrices=_BY_POWER.get(gpu.partition("-")[0], usual.matrices))


def shares_of(cluster: ClusterSpec) -> Efficiency:
    """Return the shares of a cluster's GPU: measured in a step on that cluster, or the usual ones."""
    usual = efficiency("") if cluster.gpu is None else efficiency(cluster.gpu.architecture, cluster.gpu.name)
    if cluster.shares is not None:
        measured = cluster.shares
        quicker = measured.matrices / usual.matrices  # all shares were scaled by this factor
        return Efficiency(
            measured.matrices, measured.attention, measured.bandwidth, measured.source, measured.stepping, quicker
        )
    return usual


def pcie_bytes_per_s(architecture: str) -> float:
    """Return the rate of a copy between host and device in one direction, over x16. [bytes/s]"""
    return PCIE_SHARE * _PCIE_BYTES_PER_S[_PCIE_OF.get(architecture, 5)]
