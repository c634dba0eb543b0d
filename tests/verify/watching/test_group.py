"""When a collective has returned, no other thread still holds its tensors."""

import threading
import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_every_release_after_a_collective_is_by_this_thread():
    from torch._C._distributed_c10d import ProcessGroupGloo
    from torch.distributed import AllreduceOptions, HashStore

    from zeroplan.verify.watching.allocations import recorded
    from zeroplan.verify.watching.group import TRANSPORT, WatchedGroup
    from zeroplan.verify.watching.log import Log

    calls, log = 500, Log()
    group = WatchedGroup(ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=60)), (0, 1), log)
    with recorded() as timeline:
        for _ in range(calls):
            group.allreduce([torch.ones(1)], AllreduceOptions()).wait()
    seen = timeline.without(*TRANSPORT).allocations
    assert len(log.calls) == calls
    assert sum(event.n_bytes > 0 for event in seen) == sum(event.n_bytes < 0 for event in seen) == calls


def test_a_collective_ends_when_the_last_thread_has_dropped_the_tensors_object():
    """Gloo's thread no longer counts as a holder of the tensor while it waits for Python's lock to drop the object."""
    from zeroplan.verify.watching.group import WatchedGroup, _ended
    from zeroplan.verify.watching.log import Log

    let_go = threading.Event()

    class Lingering:
        def allreduce(self, tensors: list[object]) -> object:
            threading.Thread(target=self.keep, args=tensors).start()
            return _ended([])

        def keep(self, tensor: object) -> None:
            time.sleep(0.1)
            del tensor
            let_go.set()

    given = torch.ones(1)
    WatchedGroup(Lingering(), (0, 2), Log()).allreduce([given])
    assert let_go.wait(0.05)


def test_a_tracker_does_not_see_what_the_transport_requests():
    """Gloo reduces a copy, which its thread frees at some later time."""
    from torch._C._distributed_c10d import ProcessGroupGloo
    from torch.distributed import HashStore, ReduceScatterOptions

    from zeroplan.verify.watching.group import WatchedGroup
    from zeroplan.verify.watching.log import Log
    from zeroplan.verify.watching.tracker import Tracker

    group = WatchedGroup(ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=60)), (0, 1), Log())
    with Tracker() as tracker:
        given, taken = torch.ones(256), torch.empty(256)
        group.reduce_scatter_single(taken, given, ReduceScatterOptions()).wait()
    assert [block.n_bytes for block in tracker.blocks] == [given.nbytes, taken.nbytes]
