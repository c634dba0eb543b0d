"""The memory of a reference model: its copy on the GPU beside the trained model, and its scoring forward.

Sources: trl 1.16, trainer/dpo_trainer.py, DPOTrainer.__init__, and models/utils.py, prepare_deepspeed and prepare_fsdp. DeepSpeed
shards the copy only under stage 3. FSDP2 makes the whole copy one unit, which every forward all-gathers at once. FSDP1's root
unit stays gathered after its first forward.
"""

from dataclasses import replace
from typing import NamedTuple

from zeroplan.engines.precisions import widths
from zeroplan.estimator import estimate
from zeroplan.ledger import Kind, Line
from zeroplan.spec.job import JobSpec
from zeroplan.transformer.params import layout
from zeroplan.workflow.forward import Forward, without_gradients
from zeroplan.workflow.options import Name
from zeroplan.workflow.phases import renamed

ALL_LOGITS = (
    "LLaMA-Factory, train/trainer_utils.py, get_batch_logps; torchtune, rlhf/sequence_processing.py, get_batch_log_probs"
)
WHOLE_UNIT = "trl 1.16, models/utils.py, prepare_fsdp: fully_shard of the root alone"


class Reference(NamedTuple):
    """A reference model."""

    resident: tuple[Line, ...]
    """The copy's lines; empty if the trained model without its adapters is the reference."""
    forward: Forward


def reference_of(
    job: JobSpec, whose: str = "reference model", *, head: bool = True, all_logits: int = 0, made: tuple[Line, ...] = ()
) -> Reference:  # fmt: skip
    """Return the reference model of a job: a copy, or with LoRA the trained model without its adapters. [bytes]

    ``whose``: its name in reasons; without a ``head`` its forward ends with the last norm; ``all_logits``: the bytes of a logit, if
    it makes those of all tokens at once; ``made``: what its head makes beside TRL's.
    """
    at_head = (_logits(job, all_logits),) if all_logits else made
    if job.model.adapter is not None:
        forward = without_gradients(job, at_head=at_head)
        kept = tuple(line for line in forward.lines if line.kind is not Kind.WEIGHT_CASTS or job.model.upcasts_norms)
        return Reference((), forward._replace(lines=renamed(kept, "without adapters")))  # only the adapters have casts
    forward = without_gradients(replace(job, recipe=replace(job.recipe, forward_only=True)), head=head, at_head=at_head)
    if job.recipe.engine == "fsdp2" and job.mesh.dp_shard > 1:
        forward = _gathered_whole(job, at_head)
    copy = estimate(job).states
    resident = tuple(line._replace(reason=f"{whose}: {line.reason}") for line in copy if line.kind is Kind.PARAMETERS)
    stays = _root_left_gathered(job, forward)
    lines = tuple(line for line in forward.lines if line not in stays)
    return Reference((*resident, *renamed(stays, whose)), forward._replace(lines=renamed(lines, whose)))


def _root_left_gathered(job: JobSpec, forward: Forward) -> tuple[Line, ...]:
    """The gathered root unit of FSDP1: it stays gathered after a forward, and only a backward, which never runs, would free it."""
    if job.recipe.engine != "fsdp1" or job.mesh.dp_shard == 1:
        return ()
    parts = layout(job.model)
    root = widths(job.recipe.precision).compute * sum(one.numel for one in (*parts.embeddings, *parts.tail))
    return tuple(line for line in forward.lines if line.kind is Kind.UNSHARDED_PARAMETERS and line.n_bytes == root)[:1]


def bytes_of_a_logit(workflow: Name) -> int:
    """Return what a logit takes in a reference model's forward that makes all of them at once. [bytes]

    LLaMA-Factory and torchtune make the logits in fp32, a copy of all but the last token's, and its log-softmax: 12 bytes. In KTO
    LLaMA-Factory also has the logits of the forward before (train/kto/trainer.py, ``concatenated_forward``). TRL's
    ``selective_log_softmax``, in ms-swift and Axolotl, takes up to 6 bytes less, so that this is an upper bound there.
    """
    return 16 if workflow == "kto" else 12


def _logits(job: JobSpec, each: int) -> Line:
    n_bytes = each * job.batch.micro_batch_size * job.batch.seq_len
    return Line(Kind.LOGITS, n_bytes * job.model.vocab_size, "logits of all tokens, for log-probabilities", "", ALL_LOGITS)


def _gathered_whole(job: JobSpec, at_head: tuple[Line, ...]) -> Forward:
    """FSDP2's forward of a model in one unit: the all-gather's output stays alive beside the parameters until the forward ends."""
    width = widths(job.recipe.precision).compute
    whole, formula = width * estimate(job).parameters, f"{width}·Ψ"
    gathered = (
        Line(Kind.GATHER, whole, "output of the all-gather of the whole model", formula, WHOLE_UNIT),
        Line(Kind.UNSHARDED_PARAMETERS, whole, "the whole model, gathered", formula, WHOLE_UNIT),
    )
    return without_gradients(job, gathered, at_head=at_head)
