"""Traffic of ring collectives, compared with plain data parallelism."""

import pytest

from zeroplan import ClusterSpec, Collective
from zeroplan.catalog.gpu import gpu
from zeroplan.traffic import traffic, wire_time


def all_reduce(elements: int, ranks: int) -> Collective:
    sent = 2 * 2 * elements * (ranks - 1) // ranks
    return Collective("all_reduce", "gradients", "backward", ranks, 1, 2 * elements, sent, 2 * elements)


def test_one_all_reduce_of_the_gradients_is_the_measure():
    answer = traffic((all_reduce(800, 8),), parameters=800, ranks=8, reductions=1, gradient_bytes=2)
    assert answer.relative_to_ddp == 1
    assert answer.relative_bytes_to_ddp == 1
    assert answer.total_bytes == 2 * 2 * 800 * 7 // 8


def test_nothing_is_sent_by_a_single_rank():
    answer = traffic((), parameters=800, ranks=1, reductions=1, gradient_bytes=2)
    assert answer[1:] == (0, 0, 0.0, 0.0)


def test_the_slowest_link_of_the_ring_bounds_the_time():
    h100 = gpu("h100-sxm-80gb")
    inside = wire_time(450 * 10**9, ClusterSpec(gpu=h100), gpus=8)
    between = wire_time(450 * 10**9, ClusterSpec(gpu=h100), gpus=16)
    assert inside is not None
    assert between is not None
    assert inside.seconds == pytest.approx(1.0)  # 450 GB/s per direction
    assert between.seconds == pytest.approx(450 / 400)  # eight NICs of 50 GB/s per direction
    slow = wire_time(450 * 10**9, ClusterSpec(gpu=h100, gpus_per_node=1), gpus=16)
    assert slow is not None
    assert slow.seconds == pytest.approx(9.0)  # one NIC per node
    assert wire_time(1, ClusterSpec(), gpus=8) is None
    assert wire_time(1, ClusterSpec(gpu=h100), gpus=1) is None
    assert wire_time(1, ClusterSpec(gpu=gpu("rtx-4090-24gb")), gpus=64) is None  # no rate between nodes is published
