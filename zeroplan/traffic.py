"""How much does one GPU send per step, compared with plain data parallelism, and how long does that take at least?"""

from typing import NamedTuple

from zeroplan.ledger import Collective
from zeroplan.numeric import Int
from zeroplan.spec.hardware import ClusterSpec, GpuSpec, network_bytes_per_s


class Traffic(NamedTuple):
    """The bytes and elements that one GPU sends in one optimizer step.

    ``relative_to_ddp`` is the volume in elements divided by DDP's, as in the ZeRO paper (1x, 1x, 1x, 1.5x). DDP's is a ring
    all-reduce of all gradients, 2Ψ, as often as this job reduces gradients. ``relative_bytes_to_ddp`` is the same ratio in bytes,
    with DDP's all-reduce in the dtype in which this job reduces gradients.
    """

    collectives: tuple[Collective, ...]
    total_bytes: Int
    volume_elements: Int
    relative_to_ddp: float
    relative_bytes_to_ddp: float


def traffic(
    collectives: tuple[Collective, ...], *, parameters: int, ranks: int, reductions: int, gradient_bytes: int
) -> Traffic:
    """Return the totals of one step. With one rank both ratios are 0.

    ``ranks``: all data-parallel ranks; ``reductions``: gradient reductions per step; ``gradient_bytes``: bytes per gradient element
    in the reduction.

    Source: arXiv:1910.02054, section 7, for the baseline of 2Ψ.
    """
    sent: Int = 0
    elements: Int = 0
    for call in collectives:
        sent = sent + call.sent_bytes
        elements = elements + call.volume_elements
    if ranks == 1:
        return Traffic(collectives, sent, elements, 0.0, 0.0)
    baseline = 2 * parameters * reductions
    baseline_bytes = baseline * gradient_bytes * (ranks - 1) / ranks
    return Traffic(collectives, sent, elements, float(elements / baseline), float(sent / baseline_bytes))


class WireTime(NamedTuple):
    """The lower bound of the traffic's time, and the link that limits it."""

    seconds: float
    link: str


def wire_time(sent_bytes: int, cluster: ClusterSpec, *, gpus: int) -> WireTime | None:
    """Return the time to send the step's bytes at the full rate of the slowest link that a ring crosses. [s]

    Between nodes, NCCL splits a ring into one per network card, so the rate is that of all cards of a node together. It is a lower
    bound: no latency, no protocol overhead, no other traffic. ``None`` without a GPU, or if the rate between nodes is unknown.
    """
    gpu = cluster.gpu
    if gpu is None or gpus == 1:
        return None
    per_node, inside = cluster.gpus_per_node or gpu.gpus_per_node, gpu.node_link_bytes_per_s.value
    if gpus <= per_node:
        return WireTime(sent_bytes / inside, gpu.node_link)
    network = network_bytes_per_s(cluster)
    if network is None:
        return None
    across = per_node * network
    return WireTime(sent_bytes / min(across, inside), _network(cluster, gpu) if across < inside else gpu.node_link)


def _network(cluster: ClusterSpec, gpu: GpuSpec) -> str:
    measured = cluster.network_gbit_per_s
    return gpu.network_link if measured is None else f"network cards of {measured} Gbit/s"
