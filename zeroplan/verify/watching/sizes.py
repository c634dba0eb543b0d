"""Sizes by which a block is known where neither its owner nor the function that asked tells what it is for."""

from zeroplan.ledger import Kind
from zeroplan.spec.job import JobSpec


def sizes_of_one_kind(job: JobSpec) -> dict[int, Kind]:
    """Sizes that only one kind of tensor has: one number per token and entry of the vocabulary; DeepSpeed's bucket. [bytes]"""
    elements = job.batch.micro_batch_size * job.batch.seq_len * job.model.vocab_size
    sizes = {2 * elements: Kind.LOGITS, 4 * elements: Kind.LOGITS}
    if job.recipe.engine == "deepspeed":
        bucket = job.recipe.deepspeed.reduce_bucket_size
        sizes |= {2 * bucket: Kind.REDUCE, 4 * bucket: Kind.REDUCE}
    return sizes
