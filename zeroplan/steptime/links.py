"""The time of a collective on a cluster's links: an alpha-beta model of NCCL's ring, and of its tree for all-reduces.

A ring over several nodes uses as many network cards per node as the group has members there. The group's rate is the sum of
theirs, or the rate of the links within the node if that is lower. A tree sums along a chain within each node, and up and down
two trees of nodes with half of the data each. It has fewer hops, and sends half of what a ring sends between two nodes.
"""

from typing import NamedTuple

from zeroplan.ledger import Collective
from zeroplan.memo import as_key, recalled
from zeroplan.numeric import Float, Int, ceil_div, distinct, for_each_value, longest, maximum, minimum, shortest, where
from zeroplan.spec.hardware import ClusterSpec, GpuSpec, network_bytes_per_s
from zeroplan.steptime.efficiency import LINK_SHARE, LINK_SOURCE
from zeroplan.steptime.tables import COLLECTIVES, LINK_GPUS, link_share, table_of

#: NCCL's figures for its ring with the Simple protocol (2.14, src/graph/tuning.cc, ``baseLat`` and ``hwLat``). [s]
_BASE_S, _NVLINK_HOP_S, _PCIE_HOP_S, _NETWORK_HOP_S = 8.4e-6, 3.4e-6, 5.7e-6, 9.6e-6
_LATENCY_SOURCE = "NCCL 2.14, src/graph/tuning.cc, ncclTopoTuneModel (ring and tree, Simple)"
SOURCE = f"{LINK_SOURCE}; {_LATENCY_SOURCE}"
#: The tree's latency per hop with the same protocol, on any link. [s]
_TREE_HOP_S = 28e-6


class Links(NamedTuple):
    """The links of a cluster, per GPU and direction. [bytes/s]"""

    per_node: int
    node_bytes_per_s: float
    node_hop_s: float
    network_bytes_per_s: float | None
    table: str = "h100-sxm-80gb"
    """The GPU whose measured collectives inside a node are used."""
    taken: float = 0.0
    """Share of a GPU's SMs that NCCL takes while it sends."""
    in_pairs: bool = False
    """A node has no switch: each pair of its GPUs has its own links."""

    def bytes_per_s_among(self, ranks: Int) -> Float:
        """Return the rate at which one of ``ranks`` GPUs in a node sends to the others. [bytes/s]"""
        if not self.in_pairs:
            return self.node_bytes_per_s
        return self.node_bytes_per_s * maximum(1, minimum(ranks, self.per_node) - 1) / (self.per_node - 1)


class Group(NamedTuple):
    """A process group: its size, and how many of its ranks share a node."""

    size: Int
    members: Int


def links(cluster: ClusterSpec) -> Links | None:
    """Return the links of a cluster; None without a GPU."""
    gpu = cluster.gpu
    if gpu is None:
        return None
    hop = _PCIE_HOP_S if gpu.node_link.startswith("PCIe") else _NVLINK_HOP_S
    per_node = cluster.gpus_per_node or gpu.gpus_per_node
    figures = per_node, gpu.node_link_bytes_per_s.value, hop, network_bytes_per_s(cluster), _table(gpu), _taken(gpu)
    return Links(*figures, in_pairs=per_node == _WITHOUT_A_SWITCH and gpu.node_link.startswith("NVLink"))


#: Boards of four A100, H100 or H200 join every pair directly, with a third of a GPU's links (NVIDIA HGX A100 and H100, 4-GPU).
_WITHOUT_A_SWITCH = 4


#: SMs by architecture (data sheets of A100, H100 and B200), of GPUs joined by NVLink.
_SMS = {"Ampere": 108, "Hopper": 132, "Blackwell": 148, "Blackwell Ultra": 148}
#: Channels of a ring, each on its own SM; the same number is assumed for Blackwell.
_CHANNELS = 16
CHANNELS = "NCCL's channels: 16 on eight H800 (github.com/NVIDIA/nccl/issues/892), two per card on DGX A100 (issues/320)"


def _taken(gpu: GpuSpec) -> float:
    sms = _SMS.get(gpu.architecture)
    return 0.0 if sms is None or gpu.node_link.startswith("PCIe") else _CHANNELS / sms


def _table(gpu: GpuSpec) -> str:
    """Return the GPU whose measured collectives are used: over PCIe the RTX PRO 6000 or L40S, else the nearest GPU with NVLink.

    The server of eight L40S sends at 4 to 7 % of PCIe's rate. GeForce cards without peer-to-peer reach six times as much: eight RTX
    5090 all-reduce at 28 of 63 GB/s, and RTX 4090 at nearly as much (github.com/NVIDIA/nccl/issues/1639).
    """
    if gpu.node_link.startswith("PCIe"):
        return "rtx-pro-6000-blackwell-96gb" if gpu.name.startswith("rtx") else "l40s-48gb"
    found = table_of(gpu.name, gpu.architecture)
    return found if found in LINK_GPUS else _BEFORE.get(found, "h100-sxm-80gb")


_BEFORE = {"gb300-288gb": "b300-288gb"}


def neighbours(size: Int, per_node: int) -> Group:
    """Return a group of consecutive ranks, such as shards."""
    return Group(size, minimum(size, per_node))


def strided(size: Int, stride: Int, per_node: int) -> Group:
    """Return a group of ranks that are ``stride`` apart, such as replicas."""
    return Group(size, minimum(size, maximum(1, per_node // stride)))


def pair_of(group: Group) -> Group:
    """Return two neighbours of a group in the worst case: in two nodes if the group spans several."""
    return Group(2, 2 - crosses(group))


def seconds(call: Collective, group: Group, here: Links) -> Float:
    """Return the time of all calls of a step, one after the other. [s]

    In an all-to-all every GPU sends to all others at once: over the node's links inside a node, over its network card to other
    nodes.

    A call takes NCCL's latency once per hop of the ring, and sends at the group's rate. An all-reduce across nodes uses the
    tree where that is faster, as NCCL chooses. Leaves out NVLS and in-network reduction, which make all-reduces faster;
    protocols for small messages; and other traffic.
    """
    counts = call.calls, call.n_bytes, call.sent_bytes, *group
    return recalled(lambda: (seconds, call.operation, here, tuple(map(as_key, counts))), lambda: _seconds(call, group, here))


def _seconds(call: Collective, group: Group, here: Links) -> Float:
    if call.operation not in COLLECTIVES:
        return _across_seconds(call, group, here)
    over = crosses(group)
    if isinstance(over, int):
        return _across_seconds(call, group, here) if over else _inside_seconds(call, group, here)
    if over.all():
        return _across_seconds(call, group, here)
    if not over.any():
        return _inside_seconds(call, group, here)
    across, inside = _across_seconds(call, group, here), _inside_seconds(call, group, here)
    return where(over > 0, across, inside)  # type: ignore[arg-type,return-value]  # times


def _across_seconds(call: Collective, group: Group, here: Links) -> Float:
    """Return the time of all calls of a group that spans nodes, or of an operation without measured times inside a node. [s]"""
    if call.operation == "all_to_all":
        return _exchange_seconds(call, group, here)
    ring = call.calls * latency(call.operation, group, here) + call.sent_bytes / rate(group, here)
    if call.operation != "all_reduce" or here.network_bytes_per_s is None:
        return ring
    return shortest(ring, where(crosses(group) > 0, _tree_seconds(call, group, here), ring))  # type: ignore[arg-type]  # times


def _inside_seconds(call: Collective, group: Group, here: Links) -> Float:
    """Return the time of all calls inside a node, from the measured rates by size and ranks. [s]"""
    total: Float = 0.0 * call.sent_bytes
    for ranks in distinct(group.size).values:
        if 2 <= ranks <= here.per_node:
            share = link_share(here.table, call.operation, ranks, call.n_bytes)
            takes = call.sent_bytes / (longest(share, _LEAST_SHARE) * here.bytes_per_s_among(ranks))
            total = takes if isinstance(group.size, int) else total + (group.size == ranks) * takes
    return total


#: Avoids a division by zero for an empty call.
_LEAST_SHARE = 1e-9


def _tree_seconds(call: Collective, group: Group, here: Links) -> Float:
    """Return the time of all calls through NCCL's tree, which sends the whole tensor; a k-rank ring sends 2·(k - 1)/k of it. [s]

    Two nodes send the tensor once each way. With more nodes, each of two trees carries a half: inner nodes send one half up and
    two down, leaves send one half.
    """
    whole = call.sent_bytes * group.size / (2.0 * maximum(1, group.size - 1))
    nodes = ceil_div(group.size, group.members)
    hops = maximum(0, group.members - 1) + for_each_value(_floor_log2, nodes)
    across = LINK_SHARE * (here.network_bytes_per_s or here.node_bytes_per_s) * group.members / where(nodes > 2, 2, 1)
    inside = LINK_SHARE * here.node_bytes_per_s / where(group.members > 1, 2, 1)
    return call.calls * 2 * hops * _TREE_HOP_S + whole / shortest(1.0 * across, 1.0 * inside)


def _floor_log2(nodes: int) -> int:
    return max(nodes, 1).bit_length() - 1


def _exchange_seconds(call: Collective, group: Group, here: Links) -> Float:
    """Return the time of all-to-alls, in which each GPU sends inside its node and to other nodes at the same time. [s]"""
    others = maximum(1, group.size - 1)
    to_others = call.sent_bytes * (group.size - group.members) / others
    inside = (call.sent_bytes - to_others) / (LINK_SHARE * here.node_bytes_per_s)
    across = to_others / (LINK_SHARE * (here.network_bytes_per_s or here.node_bytes_per_s))
    hop = here.node_hop_s + crosses(group) * (_NETWORK_HOP_S - here.node_hop_s)
    return call.calls * where(group.size > 1, 1, 0) * (_BASE_S + hop) + longest(inside, across)


#: HybridEP's dispatch and combine in bf16, of a GPU's links: 536 and 531 GB/s among 8 B200, 485 and 423 among 32 GB200, of 900.
#: Between nodes, of a GPU's network card: 41 and 48 of 50 GB/s among 64 H100 (github.com/deepseek-ai/DeepEP at 94a9f8f6,
#: docs/README_Hybrid-EP.md, "Torch API" with 8 and 16 SMs).
_HANDED_ON, _HANDED_ON_BETWEEN_NODES = 0.55, 0.89


def relayed_seconds(call: Collective, group: Group, here: Links, to_nodes: Float) -> Float:
    """Return the time of exchanges that send a token once to each node, whose GPUs hand it on to each other. [s]

    ``to_nodes``: the nodes that one token visits per rank that it visits. ``n_bytes`` counts a token once per rank.
    """
    nodes, sent = ceil_div(group.size, group.members), 1.0 * call.calls * call.n_bytes
    inside = sent / (_HANDED_ON * here.node_bytes_per_s)
    network = _HANDED_ON_BETWEEN_NODES * (here.network_bytes_per_s or here.node_bytes_per_s)
    return where(group.size > 1, 1, 0) * longest(inside, sent * to_nodes * (nodes - 1) / nodes / network)


def rate(group: Group, here: Links) -> Float:
    """Return the rate at which one GPU of the group sends. [bytes/s]"""
    inside = LINK_SHARE * here.bytes_per_s_among(group.members)
    if here.network_bytes_per_s is None:
        return inside
    across = LINK_SHARE * here.network_bytes_per_s * group.members
    return inside + crosses(group) * (shortest(across, inside) - inside)


def crosses(group: Group) -> Int:
    """Return 1 if the group spans nodes, else 0."""
    return where(group.size > group.members, 1, 0)


def latency(operation: str, group: Group, here: Links) -> Float:
    """Return the time of an empty call. [s]"""
    passes = 2 if operation == "all_reduce" else 1
    nodes = ceil_div(group.size, group.members)
    hops, between = passes * (group.size - 1), passes * (nodes - 1)
    lasts = _BASE_S + (hops - between) * here.node_hop_s + between * _NETWORK_HOP_S
    return where(group.size > 1, 1, 0) * lasts
