"""How many elements do Megatron-FSDP's buckets have? At stage 3 it pads each to a multiple of its ranks and of its matrices' rows.

A bucket's rows are as long as the least common multiple of its matrices' input widths. Every layer has a bucket for its experts and
one for all else, or two for all else if matrices have FP8 weights: one bucket has one dtype. Embedding, final norm and head are
together in one, or in two if the table alone is large enough.

Source: Megatron-Core 0.16.1, core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py, _get_parameter_groups and
build_data_parallel_buffer_index. Left out: padding at stage 2, whose buckets cut across layers, and the gaps between matrices,
which are smaller than a row each.
"""

from collections.abc import Iterable
from math import lcm
from typing import NamedTuple

from zeroplan.engines.megatron.chunks import runs_of
from zeroplan.engines.megatron.parameters import BY_ROWS, WEIGHTS_TOO, elements_of, in_fp8, is_expert, multiplies_in_fp8
from zeroplan.numeric import Int, maximum, round_up, where
from zeroplan.spec.described import Job
from zeroplan.transformer.parameters import Parameter

#: Elements of a bucket: the larger of the first, and of the second times the data- and context-parallel ranks.
#: Source: training/training.py, resolve_ddp_bucket_size.
_BUCKET, _BUCKET_OF_A_RANK = 40_000_000, 1_000_000


def bucket_of(job: Job) -> Int | None:
    """Return the elements at which a bucket outside the layers is closed; ``None``: one bucket has all of them."""
    if not job.recipe.megatron.overlap_grad_reduce:
        return None
    return maximum(_BUCKET, _BUCKET_OF_A_RANK * job.mesh.dp_shard * job.mesh.cp)


class Padded(NamedTuple):
    """The elements of some layers' buckets."""

    beside: Int
    """Outside experts."""
    experts: Int
    in_fp8: Int
    """In matrices that multiply in FP8, outside experts and in them."""


def padded_layer(job: Job, kind: int, *, sharers: Int, expert_sharers: Int) -> Padded:
    """Return the elements of a layer's buckets. ``kind``: the index of the layer's run."""
    runs = runs_of(job)
    one_layer = tuple(int(at == kind) for at in range(len(runs)))
    beside, experts, _ = elements_of(job, one_layer)
    multiplied = in_fp8(job, one_layer)
    if job.recipe.zero_stage < WEIGHTS_TOO:  # layers have no buckets of their own
        return Padded(beside, experts, multiplied)
    outside, inside = ([one for one in runs[kind].parameters if is_expert(one) is which] for which in (False, True))
    has_fp8 = job.recipe.megatron.fp8_format is not None  # at this stage such matrices are kept in FP8 alone
    narrow = [one for one in outside if has_fp8 and multiplies_in_fp8(one)]
    of_narrow = multiplied - experts if has_fp8 else 0
    wide = round_up(beside - of_narrow, sharers * _row([one for one in outside if one not in narrow], job))
    of_narrow = round_up(of_narrow, sharers * _row(narrow, job))
    experts = round_up(experts, expert_sharers * _row(inside, job))
    return Padded(wide + of_narrow, experts, of_narrow + experts if has_fp8 else 0)


def padded_ends(job: Job, table: Int, others: Int, sharers: Int) -> tuple[Int, Int]:
    """Return the elements of the embedding's table, and of all else outside the layers with the padding of a common bucket."""
    if job.recipe.zero_stage < WEIGHTS_TOO:
        return table, others
    row, bucket = sharers * job.model.hidden_size, bucket_of(job)
    together = round_up(table + others, row) - table
    if bucket is None:
        return table, together
    return where(table >= bucket, round_up(table, row), table), where(table >= bucket, round_up(others, row), together)


def _row(parameters: Iterable[Parameter], job: Job) -> int:
    return lcm(*(_inputs(one, job) for one in parameters if len(one.shape) > 1))


def _inputs(parameter: Parameter, job: Job) -> int:
    """Return the input features of a matrix on one rank."""
    width = parameter.shape[-2 if job.model.family == "gpt2" else -1]
    if parameter.name.split(".")[-2] not in BY_ROWS:
        return width
    tp = int(job.mesh.tp)
    return max(1, width // (job.recipe.megatron.expert_ways(tp) if is_expert(parameter) else tp))
