"""The memory of a vLLM engine on the training GPU: its share, its KV cache, its sleep mode, and the synchronisation of weights.

vLLM reserves ``ceil(total · gpu_memory_utilization)``. Its profiling run subtracts the weights, the activations of 4,096 tokens
and CUDA graphs; the rest is the KV cache. The sum is exact. The split is unknown before a run, so the KV cache is an upper bound
here.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.engines.precisions import widths
from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate
from zeroplan.ledger import Kind, Line
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.params import layout
from zeroplan.units import GIB
from zeroplan.workflow.options import WorkflowOptions, flag_of
from zeroplan.workflow.phases import HostUse, LoopPhase

SHARE = "vllm 0.33, v1/worker/utils.py, request_memory"
BLOCKS = "vllm 0.33, v1/core/kv_cache_planning.py, get_kv_cache_config_from_groups; v1/kv_cache_interface.py, AttentionSpec"
ASLEEP = "vllm 0.33, device_allocator/cumem.py, CuMemAllocator.sleep; trl 1.16, generation/vllm_generation.py"
SYNCHRONISED = "trl 1.16, generation/vllm_generation.py, VLLMGeneration.sync_weights"
BLOCK_TOKENS = 16
"""vllm 0.33, config/cache.py, CacheConfig.DEFAULT_BLOCK_SIZE."""
WIDTH = 2
"""vLLM holds weights and KV cache in the 16 bits of the checkpoint. [bytes]"""
STILL_THERE_BYTES = round(6.95 * GIB)
"""The GPU memory that a sleeping engine still uses, CUDA context included: the larger figure of two public logs, vLLM issues 47654
and 17117 (4.75 GiB). The logs are of other models and GPUs, and no formula is known, so the larger figure is the safe one."""
_ASLEEP = "vLLM asleep: CUDA graphs, libraries, its allocator's cache"
STILL_THERE = Line(Kind.TEMPORARY, STILL_THERE_BYTES, _ASLEEP, "", "vLLM issue 47654")


class Rollout(NamedTuple):
    """A vLLM engine on the training GPU."""

    share_bytes: int
    """The engine's memory while it is awake. [bytes]"""
    weights_bytes: int
    block_bytes: int
    """One block of the KV cache in all layers. [bytes]"""
    blocks: int
    """The most blocks: if the share holds only weights and KV cache."""
    sleeps: bool
    level: int

    @property
    def kv_bytes(self) -> int:
        """The upper bound of the KV cache. [bytes]"""
        return self.blocks * self.block_bytes

    @property
    def awake(self) -> tuple[Line, ...]:
        """The engine's lines while it generates. [bytes]"""
        rest = self.share_bytes - self.weights_bytes - self.kv_bytes
        return (
            self.weights,
            Line(Kind.TEMPORARY, self.kv_bytes, "vLLM: KV cache, activations and CUDA graphs", "", BLOCKS),
            Line(Kind.TEMPORARY, rest, "vLLM: less than a block", "", SHARE),
        )

    @property
    def weights(self) -> Line:
        """The engine's own copy of the weights. [bytes]"""
        return Line(Kind.PARAMETERS, self.weights_bytes, "vLLM: weights", f"{WIDTH}·Ψ", SHARE)

    @property
    def while_training(self) -> tuple[Line, ...]:
        """The engine's lines while the model trains: all, or with sleep mode what a sleeping engine still uses."""
        return (STILL_THERE,) if self.sleeps else self.awake

    @property
    def while_synchronising(self) -> tuple[Line, ...]:
        """The engine's lines while it receives new weights; a sleeping engine wakes up only its weights for that."""
        return (self.weights, STILL_THERE) if self.sleeps else self.awake


def rollout_of(job: JobSpec, options: WorkflowOptions, parameters: int) -> Rollout:
    """Return the vLLM engine of a workflow; raises SpecError if its share has no room for a KV cache. [bytes]"""
    gpu, split = job.cluster.gpu, options.split
    of_share, of_split = (
        flag_of(f"vllm_{name}", options.workflow) for name in ("gpu_memory_utilization", "tensor_parallel_size")
    )
    if gpu is None:
        raise SpecError("vLLM takes a share of a GPU, and none is named; add --gpu NAME (`zeroplan gpus` lists them)")
    if job.mesh.world_size % split:
        raise SpecError(f"{of_split} {split} does not divide {job.mesh.world_size} GPUs; use a divisor")
    share, weights = math.ceil(int(gpu.memory_bytes.value) * options.share), -(-WIDTH * parameters // split)
    block = block_bytes(job.model, split)
    if share < weights + block:
        raise SpecError(
            f"{of_share} {options.share:g} is {share:,} bytes, and vLLM's weights are {weights:,}: no room for a KV cache; use a "
            f"larger share, or a larger {of_split}"
        )
    return Rollout(share, weights, block, (share - weights) // block, options.sleeps, options.vllm_sleep_level or 2)


def block_bytes(model: ModelSpec, split: int) -> int:
    """Return the bytes of a block of 16 tokens in all layers, on one of ``split`` tensor-parallel ranks.

    >>> from zeroplan.catalog.model import model
    >>> block_bytes(model("llama-3.1-8b"), 1)  # 32 layers of 64 KiB
    2097152
    """
    if model.mla is not None or model.linear is not None or model.global_head_dim:
        raise SpecError(f"the KV cache of a {model.family} model is not modelled; use a model with plain attention")
    heads = max(1, model.num_key_value_heads // split)
    return model.num_hidden_layers * BLOCK_TOKENS * heads * 2 * model.head_dim * WIDTH


def synchronisation(answer: Estimate, resident: tuple[Line, ...], rollout: Rollout) -> LoopPhase:
    """Return the phase that copies the trained weights into vLLM, parameter by parameter. [bytes]"""
    gathered = _gathered(answer)
    lines = (*resident, *rollout.while_synchronising, *([gathered] if gathered.n_bytes else []))
    return LoopPhase("weight synchronisation", "both copies of the weights, and what is gathered", lines)


def _gathered(answer: Estimate) -> Line:
    """The largest gathered part: a parameter, a unit of FSDP1, or with adapters under ZeRO-3 the whole model, to merge them."""
    job = answer.job
    recipe, width = job.recipe, widths(job.recipe.precision)
    is_stage_3 = recipe.engine == "deepspeed" and recipe.zero_stage == 3
    if job.mesh.dp_shard == 1 or not (recipe.engine.startswith("fsdp") or is_stage_3):
        return Line(Kind.UNSHARDED_PARAMETERS, 0, "nothing is gathered", "0", SYNCHRONISED)
    if is_stage_3 and job.model.adapter is not None:
        whole, reason = width.compute * answer.parameters, "the whole model, gathered to merge adapters"
        return Line(Kind.UNSHARDED_PARAMETERS, whole, reason, f"{width.compute}·Ψ", SYNCHRONISED)
    each = width.compute if is_stage_3 else width.stored
    parts = layout(job.model)
    units = [sum(one.numel for one in run.parameters) for run in parts.runs] if recipe.engine == "fsdp1" else []
    tensors = [one.numel for one in (*parts.embeddings, *parts.tail, *(one for run in parts.runs for one in run.parameters))]
    most = max(sum(one.numel for one in (*parts.embeddings, *parts.tail)) if units else 0, *units, *tensors)
    reason = "a unit of FSDP1, gathered" if units else "the largest parameter, gathered"
    return Line(Kind.UNSHARDED_PARAMETERS, each * most, reason, f"{each}·{most}", SYNCHRONISED)


def asleep(rollout: Rollout, here: int) -> Iterator[HostUse]:
    """Yield the host memory of a sleeping engine: level 1 keeps the weights in pinned memory, level 2 only buffers. [bytes]"""
    if rollout.sleeps and rollout.level == 1:
        yield HostUse("vLLM asleep (level 1)", rollout.weights_bytes, here, "weights in pinned memory, of every GPU", ASLEEP)


def buffered(job: JobSpec, prompt: int, completion: int, steps: int, *, scored: int) -> Line:
    """Return the generated batch, kept for its training steps: ids and masks in int64, and ``scored`` fp32 numbers per token."""
    rows = steps * job.batch.micro_batch_size
    n_bytes = rows * (16 * (prompt + completion) + 4 * scored * completion)
    return Line(
        Kind.TEMPORARY, n_bytes, "completions, buffered for their steps", "", "trl 1.16, grpo_trainer.py, _prepare_inputs"
    )
