"""Trains a causal language model with torch's ``context_parallel``, which splits every sequence over ranks.

It also splits the batch's positions and shifted labels. Attention is torch's ``scaled_dot_product_attention`` without a mask.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from zeroplan.ledger import Kind, Phase
from zeroplan.spec.job import JobSpec
from zeroplan.verify.training.experts import ExpertMeshes
from zeroplan.verify.training.fsdp2 import Fsdp2
from zeroplan.verify.training.meshes import context_ranks, sharding_ranks
from zeroplan.verify.training.workload import Workload
from zeroplan.verify.watching.watcher import Watcher

Context = Callable[[], AbstractContextManager[object]]


class ContextParallel(Fsdp2):
    """``fully_shard`` over all ranks with different tokens, and ``context_parallel`` around every pass.

    ``beside`` makes a second context around each pass; ``experts`` are the meshes of experts on several ranks.
    """

    def __init__(
        self, work: Workload, job: JobSpec, mesh: DeviceMesh, *, beside: Context = nullcontext, experts: ExpertMeshes | None = None
    ) -> None:  # fmt: skip
        self._context, self._beside = context_ranks(job, mesh), beside
        self._cutting: Context = nullcontext
        super().__init__(work, job.recipe, sharding_ranks(job, mesh), experts=experts)

    def micro_step(self, enter: Callable[[Phase], None], *, last: bool) -> None:
        """Run one forward and backward pass on this rank's share of every sequence."""
        enter(Phase.FORWARD)
        buffers = list(self._work.batch.values())
        with ExitStack() as shared:
            shared.enter_context(self._beside())
            with self._cutting():
                shared.enter_context(context_parallel(self._context, buffers=buffers, buffer_seq_dims=[1] * len(buffers)))
            super().micro_step(enter, last=last)

    def labels(self, watcher: Watcher) -> AbstractContextManager[None]:
        """Also label the split copies of the batch."""
        self._cutting = partial(watcher.labelled, Kind.ACTIVATIONS)
        return super().labels(watcher)


def with_positions(work: Workload, *, seq_len: int) -> Workload:
    """The batch with positions and shifted labels, which a rank cannot derive from its part of the sequence."""
    ids = work.batch["input_ids"]
    positions = torch.arange(seq_len, device=ids.device).unsqueeze(0)
    labels = {"labels": ids.clone(), "shift_labels": ids.roll(-1, dims=1)}
    return work._replace(batch={"input_ids": ids, **labels, "position_ids": positions})
