"""The shares of a data sheet's rates that a GPU reaches in training, and what they were measured on.

Shares of the dense peak and of the memory's bandwidth are fitted to half of the published throughput in
``tests/golden/throughput.toml`` (A100 and H100, FSDP). The other half was held out, and docs/plan.md has the errors of both.
The share of Megatron-LM's matrices on A100, which tensor-parallel ranks split, is fitted likewise. Architectures without such
rows use Hopper's shares, and the answer contains a note about it.
"""

from typing import NamedTuple

from zeroplan.spec.hardware import ClusterSpec

_FITTED = "fitted to half of the published runs in tests/golden/throughput.toml"
_NOT_FITTED = "Hopper's, for want of published runs on this architecture"


class Efficiency(NamedTuple):
    """Shares of one architecture's rates, from 0 to 1, and their source."""

    matrices: float
    """Share of the dense peak in matrix products."""
    attention: float
    """Share of the dense peak in a fused causal attention kernel, without the masked half."""
    bandwidth: float
    """Share of the memory's bandwidth in memory-bound operators."""
    source: str
    stepping: float | None = None
    """Share of the memory's bandwidth in the optimizer's step, if measured apart."""

    def scaled(self, factor: float, *, stepping: float) -> "Efficiency":
        """Return the shares times a factor, and the optimizer's share times another; none beyond the data sheet."""
        parts = (self.matrices, self.attention, self.bandwidth)
        matrices, attention, bandwidth = (min(factor * share, 1.0) for share in parts)
        return Efficiency(matrices, attention, bandwidth, self.source, min(stepping * (self.stepping or self.bandwidth), 1.0))


_AMPERE = Efficiency(0.75, 0.30, 0.9, _FITTED)
_HOPPER = Efficiency(0.60, 0.20, 0.8, _FITTED)
_MEGATRON = "matrices fitted to half of the published runs in tests/golden/throughput_megatron.toml, the rest that of FSDP"
_AMPERE_MEGATRON = _AMPERE._replace(matrices=0.67, source=_MEGATRON)
_EFFICIENCIES = {"Ampere": _AMPERE, "Hopper": _HOPPER}

#: The share of its links that a ring reaches: all-gather and reduce-scatter on eight H200, 361.4 and 362.9 of 450 GB/s;
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

#: Host memory of a node of two sockets with eight channels of DDR4-3200 each.
HOST_BYTES_PER_S = 2 * 8 * 3200e6 * 8
HOST_SOURCE = (
    "AMD EPYC 7002 series data sheet: eight channels of DDR4-3200, 204.8 GB/s per socket; two sockets, shared by the ranks"
)


def efficiency(architecture: str, engine: str = "") -> Efficiency:
    """Return the shares of an architecture, under an engine.

    >>> efficiency("Ampere").source == efficiency("Hopper").source
    True
    """
    if engine == "megatron" and architecture == "Ampere":
        return _AMPERE_MEGATRON
    return _EFFICIENCIES.get(architecture, _HOPPER._replace(source=_NOT_FITTED))


def shares_of(cluster: ClusterSpec, engine: str) -> Efficiency:
    """Return the shares of a cluster's GPU: those measured in a step there, or its architecture's."""
    if cluster.shares is not None:
        told = cluster.shares
        return Efficiency(told.matrices, told.attention, told.bandwidth, told.source, told.stepping)
    return efficiency("" if cluster.gpu is None else cluster.gpu.architecture, engine)


def pcie_bytes_per_s(architecture: str) -> float:
    """Return the rate of a copy between host and device in one direction, over x16. [bytes/s]"""
    return PCIE_SHARE * _PCIE_BYTES_PER_S[_PCIE_OF.get(architecture, 5)]
