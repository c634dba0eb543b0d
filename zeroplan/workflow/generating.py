"""The memory of transformers' own ``generate`` on the training GPUs, for rollouts without vLLM.

Source: transformers 5.23, generation/utils.py, ``GenerationMixin._sample``, and cache_utils.py, ``DynamicLayer.update``.
DeepSpeed's stage 3 gathers the whole model first. A run on a CPU takes at most as much.
"""

from dataclasses import replace

from zeroplan.engines.precisions import widths
from zeroplan.estimator import Estimate
from zeroplan.ledger import Kind, Line
from zeroplan.spec.job import JobSpec
from zeroplan.workflow.forward import without_gradients
from zeroplan.workflow.phases import LoopPhase
from zeroplan.workflow.rollout import BLOCK_TOKENS, WIDTH, block_bytes

CACHE = "transformers 5.23, cache_utils.py, DynamicLayer.update"
SAMPLED = "transformers 5.23, generation/logits_process.py, TopPLogitsWarper, and generation/utils.py, _sample"
GATHERED = "trl 1.16, models/utils.py, unwrap_model_for_generation (ds3_gather_for_generation)"
_OF_A_LOGIT = 48
"""What the next token's logits take: in the model's dtype and in fp32, scaled, the top ones, sorted with their indices, summed up,
as probabilities, and masks. [bytes]"""

_OF_A_TOKEN = 40
"""Ids, the longer ids, mask, its cumulative sum and positions, in int64. [bytes]"""


def generation(answer: Estimate, prompt: int, rows: int, beside: tuple[Line, ...]) -> LoopPhase:
    """Return the phase in which transformers completes ``rows`` prompts; the lines ``beside`` are alive in it. [bytes]

    All completions are as long as they may be. Raises SpecError for attention whose cache is not modelled.
    """
    job, gathered = answer.job, _gathered(answer)
    length = job.batch.seq_len
    of_prompt = replace(job, batch=replace(job.batch, micro_batch_size=rows, seq_len=prompt, grad_accum_steps=1))
    forward = without_gradients(of_prompt, gathered or None, head=False)
    numbers = Line(Kind.TEMPORARY, _OF_A_TOKEN * rows * length, "ids, masks and positions", f"{_OF_A_TOKEN}·T", SAMPLED)
    first = (*forward.lines, numbers, _cache(job, rows, prompt))
    later = (*gathered, numbers, _cache(job, rows, length), *_of_a_layer(job, rows), _logits(job, rows))
    moment, most = max(
        ((f"the prompts: {forward.moment}", first), ("the last token of all completions", later)),
        key=lambda one: sum(int(line.n_bytes) for line in one[1]),
    )
    return LoopPhase("rollout", f"transformers generates: {moment}", (*beside, *most))


def _gathered(answer: Estimate) -> tuple[Line, ...]:
    recipe, width = answer.job.recipe, widths(answer.job.recipe.precision).compute
    if recipe.engine != "deepspeed" or recipe.zero_stage < 3 or answer.job.mesh.dp_shard == 1:
        return ()
    n_bytes = width * answer.parameters
    return (Line(Kind.UNSHARDED_PARAMETERS, n_bytes, "the whole model, gathered to generate", f"{width}·Ψ", GATHERED),)


def _cache(job: JobSpec, rows: int, length: int) -> Line:
    width = widths(job.recipe.precision).compute
    n_bytes = rows * length * block_bytes(job.model, 1) * width // (BLOCK_TOKENS * WIDTH)
    return Line(Kind.TEMPORARY, n_bytes, f"keys and values of {rows:,} sequences of {length:,} tokens", "", CACHE)


def _of_a_layer(job: JobSpec, rows: int) -> tuple[Line, ...]:
    """Return one layer's keys as they were before the last token, and keys and values repeated for all query heads."""
    model, width = job.model, widths(job.recipe.precision).compute
    each = width * rows * job.batch.seq_len * model.head_dim
    old = Line(Kind.TEMPORARY, each * model.num_key_value_heads, "one layer's keys, before they grow", "", CACHE)
    if job.recipe.attention == "flash" or model.num_key_value_heads == model.num_attention_heads:
        return (old,)
    repeated = 2 * each * model.num_attention_heads
    return (old, Line(Kind.TEMPORARY, repeated, "one layer's keys and values, repeated for all heads", "", CACHE))


def _logits(job: JobSpec, rows: int) -> Line:
    n_bytes = _OF_A_LOGIT * rows * job.model.vocab_size
    return Line(Kind.LOGITS, n_bytes, "the next token's logits, and what sampling makes of them", "", SAMPLED)
