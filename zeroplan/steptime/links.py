"""How long does a collective take on these links? An alpha-beta model of NCCL's ring, and for all-reduces of its tree.

A ring that spans nodes enters and leaves each node through as many network cards as the group has members there, so the group's
rate is theirs together, or that of the links within the node where those are slower. A tree sums along a chain within each node and
up and down two trees of nodes, each of which has half of the data: fewer hops, and between two nodes half of what a ring sends.
"""

from typing import NamedTuple

from zeroplan.ledger import Collective
from zeroplan.numeric import Float, Int, ceil_div, for_each_value, longest, maximum, minimum, shortest, where
from zeroplan.spec.hardware import ClusterSpec
from zeroplan.steptime.efficiency import LINK_SHARE, LINK_SOURCE

#: NCCL's own figures for its ring with the Simple protocol (2.14, src/graph/tuning.cc, ``baseLat`` and ``hwLat``). [s]
_BASE_S, _NVLINK_HOP_S, _PCIE_HOP_S, _NETWORK_HOP_S = 8.4e-6, 3.4e-6, 5.7e-6, 9.6e-6
_LATENCY_SOURCE = "NCCL 2.14, src/graph/tuning.cc, ncclTopoTuneModel (ring and tree, Simple)"
SOURCE = f"{LINK_SOURCE}; {_LATENCY_SOURCE}"
#: Of its tree with the same protocol, per hop on any link. [s]
_TREE_HOP_S = 28e-6


class Links(NamedTuple):
    """The links of a cluster, per GPU and direction. [bytes/s]"""

    per_node: int
    node_bytes_per_s: float
    node_hop_s: float
    network_bytes_per_s: float | None


class Group(NamedTuple):
    """Where the ranks of a process group are: how many there are, and how many of them share a node."""

    size: Int
    members: Int


def links(cluster: ClusterSpec) -> Links | None:
    """Return the links of a cluster; None without a GPU."""
    gpu = cluster.gpu
    if gpu is None:
        return None
    network = gpu.network_link_bytes_per_s
    hop = _PCIE_HOP_S if gpu.node_link.startswith("PCIe") else _NVLINK_HOP_S
    per_node = cluster.gpus_per_node or gpu.gpus_per_node
    return Links(per_node, gpu.node_link_bytes_per_s.value, hop, None if network is None else network.value)


def neighbours(size: Int, per_node: int) -> Group:
    """A group of consecutive ranks, as of shards."""
    return Group(size, minimum(size, per_node))


def strided(size: Int, stride: Int, per_node: int) -> Group:
    """A group of ranks that are ``stride`` apart, as of replicas."""
    return Group(size, minimum(size, maximum(1, per_node // stride)))


def to_the_next(group: Group) -> Group:
    """Where the two are, at the worst, of which one hands on to the other: in two nodes if the group is in several."""
    return Group(2, 2 - crosses(group))


def seconds(call: Collective, group: Group, here: Links) -> Float:
    """Time of all calls of a step, one after the other. [s]

    In an all-to-all every GPU sends to every other at once: over its own network card what leaves the node, over the links within
    the node the rest.

    A call takes NCCL's latency once per hop of the ring, and what one GPU sends takes the group's rate; an all-reduce across nodes
    goes through the tree where that is quicker, as NCCL chooses. Leaves out NVLS and in-network reduction, which are quicker for
    all-reduces, other protocols than Simple, which are for small messages, and what other traffic takes.
    """
    if call.operation == "all_to_all":
        return _exchange_seconds(call, group, here)
    ring = call.calls * latency(call.operation, group, here) + call.sent_bytes / rate(group, here)
    if call.operation != "all_reduce" or here.network_bytes_per_s is None:
        return ring
    return shortest(ring, where(crosses(group) > 0, _tree_seconds(call, group, here), ring))  # type: ignore[arg-type]  # times


def _tree_seconds(call: Collective, group: Group, here: Links) -> Float:
    """All calls through NCCL's tree. A ring sends 2·(k - 1)/k of what is summed, k ranks; the tree's rates are of the whole.

    Two nodes send it once each way; of more, those inside a tree send a half up and two halves down, those at its end a half.
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
    """Neither a ring nor a tree: what is sent leaves at once, and what crosses and what does not goes side by side."""
    others = maximum(1, group.size - 1)
    away = call.sent_bytes * (group.size - group.members) / others
    inside = (call.sent_bytes - away) / (LINK_SHARE * here.node_bytes_per_s)
    across = away / (LINK_SHARE * (here.network_bytes_per_s or here.node_bytes_per_s))
    hop = here.node_hop_s + crosses(group) * (_NETWORK_HOP_S - here.node_hop_s)
    return call.calls * where(group.size > 1, 1, 0) * (_BASE_S + hop) + longest(inside, across)


def rate(group: Group, here: Links) -> Float:
    """What one GPU of the group sends at. [bytes/s]"""
    inside = LINK_SHARE * here.node_bytes_per_s
    if here.network_bytes_per_s is None:
        return inside
    across = LINK_SHARE * here.network_bytes_per_s * group.members
    return inside + crosses(group) * (shortest(across, inside) - inside)


def crosses(group: Group) -> Int:
    """1 where the group spans nodes, else 0."""
    return where(group.size > group.members, 1, 0)


def latency(operation: str, group: Group, here: Links) -> Float:
    """What a call takes with nothing to send. [s]"""
    passes = 2 if operation == "all_reduce" else 1
    nodes = ceil_div(group.size, group.members)
    hops, between = passes * (group.size - 1), passes * (nodes - 1)
    lasts = _BASE_S + (hops - between) * here.node_hop_s + between * _NETWORK_HOP_S
    return where(group.size > 1, 1, 0) * lasts
