"""What Aleph Alpha's program computes and sends otherwise than Megatron-Core (github.com/Aleph-Alpha/scaling at 737f855).

zeroplan has no engine for it, so its published runs are predicted as Megatron-Core's, with these differences of its code:

- ``core/nn/linear/column_parallel_linear.py``: each product sums the gradient of its own input. The gated MLP has two of them
  (``core/nn/mlp.py``), so a block has three sums in the backward instead of two.
- ``core/nn/linear/utils.py``, ``_GatherFromSequenceParallelRegion``: autograd keeps the gathered input, and the backward does not
  gather it again.
- ``transformer/model/layers/lm_head.py`` and ``losses/cross_entropy.py``: every tensor-parallel rank gathers all logits, copies
  them together (``_all_concat``), computes the loss operator by operator, and looks for the largest logit (``accuracy``).
- ``core/nn/parallel_module/pipeline_partitioning.py``: stages share out the embedding, the last norm and the head as if they
  were layers, so the last stage has two or three layers fewer.
- Rows with "RMS kernel" have one kernel for that norm. Rotary positions and the gate stay eager.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from zeroplan.engines.megatron import traffic
from zeroplan.ledger import Among, Collective, Phase
from zeroplan.steptime import megatron, pointwise
from zeroplan.steptime.pointwise import Moved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zeroplan.engines.megatron.rank import Rank
    from zeroplan.numeric import Int
    from zeroplan.spec.described import Job
    from zeroplan.spec.model import ModelSpec
    from zeroplan.steptime.pointwise import Split

#: Bytes per logit: ``argmax`` reads fp32; ``all_gather`` copies out of its buffer, and ``cat`` copies once more.
_ARGMAX, _COPIES = 4, 4 + 4


def uniform_stages(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage (``pipe_partition_uniform``, the default).

    >>> uniform_stages(40, 4)
    [10, 11, 11, 8]
    """
    each, more = divmod(layers + 3, stages)
    sizes = [each + (at < more) for at in range(stages)]
    return [sizes[0] - 1, *sizes[1:-1], sizes[-1] - 2]


@contextmanager
def as_it_runs(*, rms_kernel: bool) -> Iterator[None]:
    """Predict the steps of Aleph Alpha's program, with eager kernels, as long as this lasts."""
    fused = ("rms-norm",) if rms_kernel else ()
    changed: tuple[tuple[Any, str, Any], ...] = (
        (megatron, "collectives_of_passes", _sent),
        (pointwise, "of_block", partial(pointwise.of_block, fused=fused)),
        (pointwise, "of_ends", partial(_ends, pointwise.of_ends, fused=fused)),
    )
    with ExitStack() as stack:
        for module, name, other in changed:
            stack.enter_context(patch.object(module, name, other))
        yield


def _sent(rank: Rank, job: Job) -> Iterator[Collective]:
    batch, tp = job.batch, job.mesh.tp
    pairs = 2 * batch.grad_accum_steps * rank.layers
    for call in traffic.collectives_of_passes(rank, job):
        in_blocks = call.among is Among.TENSOR and call.what == "hidden states" and call.phase is Phase.BACKWARD
        if in_blocks and call.operation == "all_reduce":
            yield _called(call, call.calls + pairs // 2)
        elif in_blocks and call.operation == "all_gather":
            yield _called(call, call.calls - pairs)
        elif call.what != "numbers of the loss":
            yield call
    if rank.has_head and tp > 1:
        logits = 2 * batch.micro_batch_size * batch.seq_len * job.model.vocab_size
        sent = batch.grad_accum_steps * (logits - logits // tp)
        yield Collective(
            "all_gather", "logits", "forward", tp, batch.grad_accum_steps, logits, sent, 0,
            near=True, phase=Phase.FORWARD, among=Among.TENSOR,
        )  # fmt: skip


def _called(call: Collective, calls: Int) -> Collective:
    return call._replace(calls=calls, sent_bytes=call.sent_bytes * calls // call.calls)


def _ends(usual: Any, model: ModelSpec, _kernels: str, split: Split, fused: tuple[str, ...]) -> Moved:
    """Return the bytes of the ends, with a loss of all logits on every rank."""
    part = usual(model, "eager", split, fused)
    share, whole = split.tokens * model.vocab_size / split.tp, split.tokens * model.vocab_size
    loss = Moved().plus(pointwise.LOGITS["eager"], whole - share)
    return part.and_of(loss._replace(forward=loss.forward + whole * (_ARGMAX + _COPIES * (split.tp > 1))))
