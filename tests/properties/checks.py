"""Checks that hold for every job. Each takes a job and a random generator, and raises AssertionError if it fails.

:mod:`tests.properties.test_random_jobs` checks 200 jobs in every run of the tests, and :mod:`tests.properties.nightly` as many as
its flags set. A job may also be refused in one line: the check then raises Refused.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from math import inf
from random import Random
from typing import Any

from tests.formulas import assert_explained, assert_symbols_mean_one_thing
from tests.properties.columns import at_place, grid_of, is_beyond_the_window, points_of
from tests.properties.folder import folder
from zeroplan import Estimate, JobSpec, Kind, MeshSpec, RecipeSpec, estimate
from zeroplan.catalog.gpu import gpu
from zeroplan.catalog.model import model as published
from zeroplan.engines.account import Account
from zeroplan.engines.megatron.chunks import chunks_per_rank
from zeroplan.engines.megatron.inputs import ATTENTION_MASK
from zeroplan.engines.megatron.leftover import GRAPHS
from zeroplan.engines.optimizers import implementation_of
from zeroplan.engines.quantised import TABLES
from zeroplan.engines.requests import STEPS, not_written, requests_of
from zeroplan.errors import SpecError
from zeroplan.estimator import account_of
from zeroplan.export.files import TARGETS, Export, Target, cannot_say, export, write
from zeroplan.job_file import read_job_file
from zeroplan.ledger import Among, Collective, Line, Phase, total_bytes
from zeroplan.numeric import ceil_div, maximum
from zeroplan.remedies import remedies
from zeroplan.report.payload import estimate_payload
from zeroplan.report.text import estimate_text
from zeroplan.resolve import request_of, resolve
from zeroplan.spec.base import read
from zeroplan.spec.float8 import ON_BLACKWELL
from zeroplan.spec.hardware import node_size
from zeroplan.spec.job import ENGINE_STAGES
from zeroplan.spec.pipeline import stages_per_rank
from zeroplan.spec.recipe import ADAM, DeepSpeedOptions
from zeroplan.steptime import StepTime, step_time
from zeroplan.transformer.families.traced import EXCESS
from zeroplan.transformer.megatron import cost_of

Check = Callable[[JobSpec, Random], None]


_WRITTEN_OUT = 8
"""The most layers times micro-batches of a step whose requests are compared; larger jobs only repeat the same requests."""


class Refused(Exception):  # noqa: N818  not an error
    """The check does not apply: zeroplan refuses the job, or the check excludes it."""


@lru_cache(maxsize=16)
def _estimated(job: JobSpec) -> Estimate:
    """Return the estimate, cached because several checks of one job need it."""
    return estimate(job)


def answered(job: JobSpec) -> Estimate:
    """Return the estimate. Raises Refused if zeroplan refuses the job, which must be in one line."""
    try:
        return _estimated(job)
    except SpecError as error:
        refusal = str(error)
    assert refusal.strip()
    assert "\n" not in refusal
    raise Refused(refusal)


# --- numbers -------------------------------------------------------------------------------------------------------------


def adds_up(job: JobSpec, _: Random) -> None:
    """Lines sum to totals, the peak is the largest moment, and no number is negative or larger than the job could ever need."""
    answer = answered(job)
    totals = [sum(line.n_bytes for line in moment.lines) for moment in answer.moments]
    every = {id(line): line for lines in (answer.states, *(moment.lines for moment in answer.moments)) for line in lines}
    lines = every.values()  # each line once, by identity, which is faster than comparing texts
    assert answer.peak_bytes == max(totals)
    assert all(type(line.n_bytes) is int and line.n_bytes >= 0 for line in lines)
    assert all(type(line.n_bytes) is int and line.n_bytes >= 0 for line in (*answer.host, *answer.nvme))
    assert sum(answer.states_by_kind.values()) == sum(line.n_bytes for line in answer.states)
    low, expected, high = answer.reserved
    assert answer.peak_bytes <= low <= expected <= high
    if job.recipe.engine == "paper":
        assert low == answer.peak_bytes, "a band that is not measured begins at the peak"
    assert answer.traffic.total_bytes == sum(call.sent_bytes for call in answer.traffic.collectives) >= 0
    assert least(answer) <= sum(answer.states_by_kind.values()) + answer.host_bytes + answer.nvme_bytes, "less than the shard"
    assert answer.peak_bytes <= most(job, answer.parameters), "more than could ever be asked for"
    assert answer.traffic.total_bytes <= 1000 * most(job, answer.parameters) * job.batch.grad_accum_steps


def least(answer: Estimate) -> int:
    """Return a lower bound for any sharding: two bytes for each trained parameter of a rank's even share. [bytes]"""
    mesh, of_pipeline = answer.job.mesh, answer.pipeline
    if answer.job.recipe.megatron.hybrid_layer_pattern is not None:  # whose layers the model's number of parameters leaves out
        return 0
    if of_pipeline:
        return 2 * of_pipeline[0].parameters // (mesh.world_size // mesh.dp_replicate)
    return 2 * answer.trained_parameters // (mesh.world_size // mesh.dp_replicate)


def most(job: JobSpec, parameters: int) -> int:
    """Return a generous upper bound: 64 bytes per parameter, and each activation eight times in fp32. [bytes]"""
    model, batch, options = job.model, job.batch, job.recipe.deepspeed
    tokens, layers = (
        batch.micro_batch_size * batch.seq_len * (1 if job.mesh.pp == 1 else batch.grad_accum_steps),
        model.num_hidden_layers + 2,
    )
    ffn = max(
        model.intermediate_size,
        0 if model.moe is None else 8 * model.moe.moe_intermediate_size * (1 + model.moe.num_shared_experts),
    )
    attention = model.num_attention_heads * (8 * model.head_dim + 8 * batch.seq_len + 1024)
    adapters = 0 if model.adapter is None else 14 * model.adapter.rank
    width = 16 * model.hidden_size + attention + 8 * ffn + adapters + (64 * model.moe.num_experts if model.moe else 0)
    # torch's Kimi Delta Attention has the decay between all tokens of a chunk. A simulated run of 32,768 tokens, with 16 heads of
    # 128 in fp32, takes 223.9 GB, as estimated to 152 bytes; the bound without this term is 204.7 GB.
    if model.linear is not None:
        width += model.linear.chunk_size * model.linear.num_value_heads * model.linear.key_head_dim
    buckets = (
        16 * (3 * options.reduce_bucket_size + options.stage3_prefetch_bucket_size) if job.recipe.engine == "deepspeed" else 0
    )
    profiled = 10**12 * tokens if model.profile else 0
    return 64 * _padded(job, parameters) + 32 * tokens * (layers * width + 2 * model.vocab_size) + buckets + 10**10 + profiled


def _padded(job: JobSpec, parameters: int) -> int:
    """Return the parameters with FSDP2's padding: it pads each tensor's first dimension to a multiple of the ranks.

    Expert tensors have few rows there, so that their padding is large. Megatron-FSDP pads experts to whole rows of each rank.
    """
    if (job.recipe.engine, job.recipe.zero_stage) == ("megatron", 3):
        return max(parameters, _share(job) * job.mesh.world_size)
    rows = min(job.model.hidden_size, job.model.moe.num_experts if job.model.moe else job.model.hidden_size)
    return parameters * (1 + job.mesh.dp_shard * job.mesh.cp // rows if job.recipe.engine == "fsdp2" else 1)


def is_explained(job: JobSpec, _: Random) -> None:
    """Every line's formula gives its bytes, every line has a source, and each symbol has one meaning."""
    answer = answered(job)
    profile = job.model.profile
    if profile is not None and any(one.counted_by > 1 for each in profile.variants for one in (each.one, each.more)):
        raise Refused("lengths of this trace count as the next multiple, for which formulas have no symbol")
    if job.model.vision is not None and job.model.vision.has_blocks:
        raise Refused("blocks of a vision tower have no formulas, whose symbols would be the text's")
    assert_explained(answer)
    assert_symbols_mean_one_thing(answer)


def can_be_said(job: JobSpec, _: Random) -> None:
    """An answer has a text, changes and JSON, and its job can be read back from the JSON and from a job file."""
    answer = answered(job)
    assert "Peak allocated" in estimate_text(answer)
    payload = estimate_payload(answer, changes=remedies(answer) if answer.verdict == "does not fit" else ())
    text = json.dumps(payload, allow_nan=False)
    assert read(JobSpec, json.loads(text)["job"], where="payload") == job
    file = folder() / "job.json"
    file.write_text(json.dumps(json.loads(text)["job"]))
    assert resolve(read_job_file(file)).job == job


# --- a grid is its points ------------------------------------------------------------------------------------------------


def grid_is_its_points(job: JobSpec, draw: Random) -> None:
    """Columns of ranks and batches give the same numbers at every place as single jobs."""
    answered(job)
    points = points_of(job, draw)
    grids = grid_of([one for one, _ in points])
    highest = [_moments(grid) for grid in grids]
    for at, (_, accounts) in enumerate(points):
        for grid, columns, account in zip(grids, highest, accounts, strict=True):
            found, expected = (
                {name: at_place(most, at) for name, most in every.items()} for every in (columns, _moments(account))
            )
            assert max(found.values()) == max(expected.values())
            assert all(found.get(name, -1) >= n_bytes for name, n_bytes in expected.items())
            states = [sum(at_place(line.n_bytes, at) for line in both.states) for both in (grid, account)]
            assert states[0] == states[1], states
            sent = [
                [(_what(call), at_place(call.sent_bytes, at)) for call in both.collectives if at_place(call.sent_bytes, at)]
                for both in (grid, account)
            ]
            assert sent[0] == sent[1], sent


def _what(call: Collective) -> str:
    """Return what is sent, with one name for gradients that ZeRO++ does not quantize, since columns have only one."""
    return {"gradients that are not quantized": "gradients, bucket by bucket"}.get(call.what, call.what)


def _moments(account: Account) -> dict[str, Any]:
    """Return the highest total for each name of a moment: a grid has moments for one micro-batch and for several."""
    found: dict[str, Any] = {}
    for moment in account.moments:
        found[moment.name] = maximum(moment.total_bytes, found.get(moment.name, 0))
    return found


# --- more never costs less -----------------------------------------------------------------------------------------------


def _peak(job: JobSpec) -> int:
    return answered(job).peak_bytes


def _changed(job: JobSpec, **parts: Any) -> JobSpec:
    """Return the job with some parts replaced. Raises Refused if the parts contradict each other."""
    try:
        return replace(job, **parts)
    except SpecError as error:
        raise Refused(str(error)) from None


def grows_with_the_batch(job: JobSpec, _: Random) -> None:
    """Twice the sequences never need less memory, except where one sequence runs another program than several.

    A traced module may have two programs. With one sequence, selective recomputation keeps a joint projection, whose slices are
    views; several sequences need copies of the slices instead.
    """
    profile, sequences = job.model.profile, job.batch.micro_batch_size
    if profile is not None and sequences == 1 and any(variant.one != variant.more for variant in profile.variants):
        raise Refused("one sequence alone runs a program of its own in this profile")
    larger = _changed(job, batch=replace(job.batch, micro_batch_size=2 * sequences))
    views = sum(int(line.n_bytes) for _, lines in answered(job).kept for line in lines if "max(0, 2-b)" in line.formula)
    assert _peak(larger) + job.model.num_hidden_layers * views >= _peak(job)


def grows_with_the_sequence(job: JobSpec, _: Random) -> None:
    """Sequences twice as long never need less memory, if both lengths are on the same side of a sliding window.

    Sequences longer than the window have a mask. With a mask torch runs another kernel, with its own scratch, than flash attention
    or than the kernel that saves all scores in fp32.
    """
    larger = _changed(job, batch=replace(job.batch, seq_len=2 * job.batch.seq_len))
    if is_beyond_the_window(larger) and not is_beyond_the_window(job):
        raise Refused("the longer sequence has a mask, with which torch runs another kernel")
    assert _peak(larger) >= _peak(job)


def grows_with_layers(job: JobSpec, _: Random) -> None:
    """Another layer never needs less memory, except for gathered parameters and for the distribution of optimizer state.

    ZeroRedundancyOptimizer distributes whole tensors, the largest first: with another layer this rank may get fewer elements.
    DeepSpeed's stage 3 gathers ahead by numbers of elements (``stage3_max_live_parameters``, ``stage3_prefetch_bucket_size``):
    with another layer in between, embedding and head may no longer be gathered at the same time. Megatron-FSDP's queues have whole
    layers, of another average size where layers differ.
    """
    if job.model.profile is not None:
        raise Refused("a profile has its layers")
    model, moe, more = job.model, job.model.moe, _one_for_each_chunk(job)
    more *= 6 if model.family == "gemma4_text" else max(1, model.cross_layers)  # layers come in sixes, or in equal periods
    if moe is not None and moe.num_dense_layers == model.num_hidden_layers:  # add a layer of the only kind
        moe = replace(moe, num_dense_layers=moe.num_dense_layers + more)
    deeper = _changed(job, model=replace(model, num_hidden_layers=model.num_hidden_layers + more, moe=moe))
    highest = answered(job).peak.name
    less = max(0, _gathered(job, highest) - _gathered(deeper, highest)) if _gathers_ahead(job) else 0
    if (job.recipe.engine, job.recipe.zero_stage) == ("ddp", 1):
        less = max(0, _of_optimizer(job) - _of_optimizer(deeper))
    if (job.recipe.engine, job.recipe.zero_stage) == ("megatron", 3):
        less = max(_whole(job, highest) - _whole(deeper, name) for name in (highest, answered(deeper).peak.name))
    assert _peak(deeper) + max(0, less) >= _peak(job)


def _one_for_each_chunk(job: JobSpec) -> int:
    """Return how many layers to add: one, or under Megatron-LM one for each pipeline chunk.

    With one more layer, Megatron-LM would cut the model differently. It puts three of twelve layers on each of four ranks, and
    thirteen layers as 3, 4, 4 and 2: the last rank, which may be the fullest, would have fewer.
    """
    return job.mesh.pp * chunks_per_rank(job) if job.recipe.engine == "megatron" else 1


def _of_optimizer(job: JobSpec) -> int:
    """Return the optimizer's state and temporaries in its step. [bytes]"""
    kinds = (Kind.OPTIMIZER_STATE, Kind.OPTIMIZER_TEMPORARY)
    step = [moment for moment in answered(job).moments if moment.phase is Phase.STEP]
    return max(sum(int(line.n_bytes) for line in moment.lines if line.kind in kinds) for moment in step)


def _gathers_ahead(job: JobSpec) -> bool:
    """Whether the engine gathers parameters ahead, so that the gathered memory depends on the next layers.

    DeepSpeed's stage 3 gathers ahead by numbers of elements. FSDP2 gathers an embedding in its own unit during the first block's
    backward; in a model of one block, the head's gradients are still being reduced then.
    """
    recipe = job.recipe
    alone = recipe.engine == "fsdp2" and recipe.fsdp2.shards_ends and job.model.num_hidden_layers == 1
    return (recipe.engine == "deepspeed" and recipe.zero_stage == 3) or alone


def _gathered(job: JobSpec, name: str) -> int:
    """Return the gathered parameters at the highest moment of this name. [bytes]"""
    return _of_moment(job, name, lambda line: line.kind is Kind.GATHER)


def _whole(job: JobSpec, name: str) -> int:
    """Return the whole weights and gradients at the highest moment of this name. [bytes]"""
    kinds = (Kind.UNSHARDED_PARAMETERS, Kind.UNSHARDED_GRADIENTS)
    return _of_moment(job, name, lambda line: line.kind in kinds)


def _of_moment(job: JobSpec, name: str, counts: Callable[[Line], bool]) -> int:
    """Return the bytes of the chosen lines at the highest moment of this name."""
    named = [moment for moment in answered(job).moments if moment.name == name] or answered(job).moments
    highest = max(named, key=lambda moment: moment.total_bytes)
    return sum(int(line.n_bytes) for line in highest.lines if counts(line))


def _of_peak(job: JobSpec, *reasons: str) -> int:
    """Return the bytes of the lines with these reasons at the peak."""
    return sum(int(line.n_bytes) for line in answered(job).peak.lines if line.reason in reasons)


def _held(job: JobSpec) -> dict[Kind, int]:
    """Return the model states by kind; of a pipeline, those of rank 0, even if another rank has the highest peak."""
    answer = answered(job)
    return (answer if job.mesh.pp == 1 else estimate(job, pipeline_rank=0)).states_by_kind


def falls_with_ranks(job: JobSpec, _: Random) -> None:
    """With twice the sharding ranks, a rank never holds more parameters or optimizer state, except for DeepSpeed's padding.

    DeepSpeed pads to 2·N elements. The check leaves out 8-bit AdamW, which keeps 32-bit states for tensors, or shards, below 4,096
    elements. It also leaves out ZeroRedundancyOptimizer, which distributes whole tensors and sometimes less evenly.
    """
    if job.recipe.optimizer == "adamw-8bit" or (job.recipe.engine, job.recipe.zero_stage) == ("ddp", 1):
        raise Refused("its states do not fall evenly")
    wider = _changed(job, mesh=_wider(job.mesh))
    fewer, more = _held(job), _held(wider)
    padding = 4 * 2 * wider.mesh.dp_shard if job.recipe.engine == "deepspeed" else 0
    for kind in (Kind.PARAMETERS, Kind.OPTIMIZER_STATE):
        assert more[kind] <= fewer[kind] + padding, kind


def falls_with_stage(job: JobSpec, _: Random) -> None:
    """A higher stage of the same engine never holds more model states, except for flat copies and padding.

    DeepSpeed has flat copies of the weights. Megatron-FSDP pads buckets at stage 3, for up to 20 bytes per parameter.
    """
    recipe = job.recipe
    above = [stage for stage in ENGINE_STAGES[recipe.engine] if stage > recipe.zero_stage]
    if not above:
        raise Refused("no stage above")
    higher = _changed(job, recipe=replace(recipe, zero_stage=min(above)))
    fewer, more = sum(_held(higher).values()), sum(_held(job).values())
    own = 8 * (answered(job).parameters // job.mesh.dp_shard + 2 * job.mesh.dp_shard) if recipe.engine == "deepspeed" else 0
    if recipe.engine == "megatron" and higher.recipe.zero_stage == 3:
        own = 20 * (_share(higher) - _share(job))
    assert fewer <= more + own


def _share(job: JobSpec) -> int:
    """Return the parameters whose optimizer states a rank of Megatron has, with the buckets' padding."""
    values = {symbol.name: symbol.value for symbol in answered(job).symbols}
    return int(ceil_div(values["D_rank"], values["N_opt"]) + ceil_div(values["X_rank"], values["N_exp"]))


#: Lines of a checkpoint's inputs, which are alive only, or so late, because of recomputation.
_OF_CHECKPOINTS = (
    "block input", "inputs of the blocks before this one (checkpoints)", "attention mask of eager attention",
    "masks of eager attention, local and global", "mask of the sliding window, booleans",
    "position ids, int64, held by checkpoints",
    "rotary cos and sin, of half of each head",  # GLM-4's, of which autograd saves only copies
    GRAPHS,  # of the recomputed forwards
    # In a model whose layers are all of linear attention the estimate keeps this mask until the backward; a simulated run of one
    # Qwen3.5 layer does not, and takes the mask's bytes less.
    "attention mask with padding, booleans for each sequence",
    "attention masks with padding, local and global, booleans for each sequence",  # blocks save them in numbers
)  # fmt: skip


def falls_with_recomputation(job: JobSpec, _: Random) -> None:
    """More recomputation needs at most a checkpoint's inputs more, and the gradients alive with a recomputed forward.

    If the peak is in the backward of the last block, recomputation saves nothing, and adds the inputs of the checkpoint. A
    recomputed forward is alive with the gradients that the backward has made until then; the first forward was not. Megatron-LM's
    checkpoints save the attention mask of every micro-batch in flight; without them there is only one mask. The check leaves out
    profiles, and models with frozen parts or adapters: below the lowest gradient their blocks save nothing, but checkpoints do.
    DeepSpeed's stage 3 gathers the recomputed block ahead.
    """
    names = ("none", "selective", "full")
    at, model = names.index(job.recipe.recompute), job.model
    frozen = model.frozen is not None or (model.vision is not None and model.vision.freeze_tower)
    if at == 0 or model.adapter is not None or frozen or model.profile is not None:
        raise Refused("nothing to compare")
    more = _changed(job, recipe=_told(job, recompute_layers=None, offload_activations=False))
    selective = at == 2 and not _gathers_ahead(job)  # DeepSpeed's stage 3 has no selective recomputation
    less = _changed(more, recipe=_told(more, recompute="selective" if selective else "none"))
    own = _of_peak(more, *_OF_CHECKPOINTS) + _of_megatron(more, less) + _masks_in_checkpoints(more, less)
    if any(
        line.reason == "activations of the block that runs" for line in answered(more).peak.lines
    ):  # the block's input is one of them
        own += (4 if job.recipe.precision == "fp32" else 2) * _tokens(job) * model.hidden_size
    own += _kept_selectively(more)
    if _gathers_ahead(job):
        highest = answered(more).peak.name
        own += max(0, _gathered(more, highest) - _gathered(less, highest))
    if answered(more).peak.name == "experts gathered for their forward":  # overestimated (docs/limits.md)
        own += _of_peak(more, EXCESS)
    once = max(_peak(less), _forward_beside_gradients(more, less)) if _is_run_again(more) else _peak(less)
    assert _peak(more) <= once + own


def _kept_selectively(more: JobSpec) -> int:
    """Return the outputs that selective recomputation keeps of a block, if the peak is in a forward. [bytes]

    They are alive from the start of the recomputed forward. In the first forward they are not the tensors that autograd saves: they
    are projections before the rotary embedding, whose results are alive at the same time.
    """
    answer = answered(more)
    forward = answer.peak.name.startswith("forward") or _is_run_again(more)
    if more.recipe.recompute != "selective" or not forward:
        return 0
    return max((sum(int(line.n_bytes) for line in lines) for _, lines in answer.kept), default=0)


def _is_run_again(job: JobSpec) -> bool:
    """Whether the peak is in a recomputed forward."""
    name = answered(job).peak.name
    return "again" in name or "recomputed" in name


def _forward_beside_gradients(more: JobSpec, less: JobSpec) -> int:
    """Return the peak of the first forward, plus the gradients alive with the recomputed one. [bytes]

    Gradients and buckets of the first forward are left out, because those of the backward replace them. DeepSpeed makes its buckets
    at a backward's first gradient (0.19.8, stage_1_and_2.py, ``process_gradients`` calls ``setup_buckets``).
    """
    forwards = [moment.lines for moment in answered(less).moments if moment.phase is Phase.FORWARD]
    before = max((sum(int(line.n_bytes) for line in lines if line.kind not in _OF_BACKWARD) for lines in forwards), default=0)
    return before + sum(int(line.n_bytes) for line in answered(more).peak.lines if line.kind in _OF_BACKWARD)


#: The kinds that a backward allocates.
_OF_BACKWARD = (Kind.ACTIVATION_GRADIENTS, Kind.UNSHARDED_GRADIENTS, Kind.GRADIENTS, Kind.REDUCE)


def _of_megatron(more: JobSpec, less: JobSpec) -> int:
    """Return what a wholly recomputed layer of Megatron-Core has more than one of which only attention is recomputed. [bytes]

    That is its MLP, further layers of its checkpoint, and what attention keeps: selective recomputation runs attention again only
    after the backward of the MLP. A checkpoint's backward also holds its output and the gradient of it.
    """
    answer = answered(more)
    if more.recipe.engine != "megatron" or not _is_run_again(more):
        return 0
    lines = answer.peak.lines
    mlp = sum(
        int(line.n_bytes) for line in lines if line.reason.startswith(("MLP: ", "experts: ", "router: ", "shared expert: "))
    )
    together = sum(int(line.n_bytes) for line in lines if "more layers of the checkpoint" in line.reason)
    output = sum(int(line.n_bytes) for line in lines if line.reason == "output of the layer")
    return mlp + together + 2 * output + max(_lacks(kind, more, less) for kind, _ in answer.kept)


def _lacks(kind: str, more: JobSpec, less: JobSpec) -> int:
    """Return what a layer without recomputation keeps, minus what it keeps with less recomputation. [bytes]"""
    whole, left = (cost_of(job, kind) for job in (_changed(more, recipe=_told(more, recompute="none")), less))
    return total_bytes((*whole.kept, *whole.statistics)) - total_bytes((*left.kept, *left.statistics))


def _masks_in_checkpoints(more: JobSpec, less: JobSpec) -> int:
    """Return the attention masks that Megatron-LM's checkpoints save, beyond the masks alive without checkpoints. [bytes]

    Source: Megatron-LM 2026-08, ``_checkpointed_attention_forward`` (megatron/core/transformer/attention.py) and
    ``checkpointed_forward`` (megatron/core/recompute.py) pass the mask to ``CheckpointFunction``, which saves its arguments.
    """
    without = _of_moment(less, answered(more).peak.name, lambda line: line.reason == ATTENTION_MASK)
    return max(0, _of_peak(more, ATTENTION_MASK) - without)


def _tokens(job: JobSpec) -> int:
    return job.batch.micro_batch_size * job.batch.seq_len


def _told(job: JobSpec, **parts: Any) -> RecipeSpec:
    try:
        return replace(job.recipe, **parts)
    except SpecError as error:
        raise Refused(str(error)) from None


def _wider(mesh: MeshSpec) -> MeshSpec:
    try:
        return replace(mesh, dp_shard=2 * mesh.dp_shard)
    except SpecError as error:  # more GPUs than a job may have
        raise Refused(str(error)) from None


def stages_agree_on_one_rank(job: JobSpec, _: Random) -> None:
    """On one rank all stages of the paper have the same peak, and so have all stages of Megatron-Core.

    The job has one tensor-parallel rank, too, because for experts tensor-parallel ranks are data-parallel ones. The stages of other
    engines also differ in buckets, flat copies, and gathered parameters.
    """
    if job.recipe.engine not in ("paper", "megatron"):
        raise Refused("the stages of an engine differ in more than what they shard")
    totals = set[int]()
    for stage in ENGINE_STAGES[job.recipe.engine]:
        one = _changed(
            job,
            mesh=replace(job.mesh, dp_shard=1, dp_replicate=1, tp=1, cp=1, ep=1),
            recipe=replace(job.recipe, zero_stage=stage),
        )
        totals.add(_peak(one))
    assert len(totals) == 1


def adapters_take_less(job: JobSpec, _: Random) -> None:
    """Training fewer parameters holds less model state, if states are whole on every rank and weights have 16 bits.

    bitsandbytes' code tables are left out: each weight in 4 bits has its own, of up to 1,092 bytes, even if the weight is small.
    """
    model = job.model
    if model.adapter is None and model.frozen is None:
        raise Refused("everything is trained")
    job = _changed(job, recipe=_told(job, engine="ddp", zero_stage=0, precision="bf16-mixed"), mesh=MeshSpec())
    if 4 * answered(job).trained_parameters >= answered(job).parameters:
        raise Refused("too much is trained")
    whole = _changed(job, model=replace(model, adapter=None, frozen=None))
    tables = sum(int(line.n_bytes) for line in answered(job).states if line.source == TABLES)
    assert sum(_held(job).values()) - tables < sum(_held(whole).values())


# --- time ----------------------------------------------------------------------------------------------------------------


def has_a_time(job: JobSpec, _: Random) -> None:
    """A step has a positive time, no part is negative, and the MFU is at most 1.

    Overlapping communication under Megatron-LM never makes a step slower. The check does not demand that twice the sequences take
    longer: collectives and copies are hidden behind the same computation, so that more computation can hide more than it takes.
    """
    if job.cluster.gpu is None:
        card = gpu("b200" if job.recipe.float8_recipe in ON_BLACKWELL else "h100-sxm-80gb")
        job = replace(job, cluster=replace(job.cluster, gpu=card, gpus_per_node=node_size(job.cluster) or 8))
    time = _time(job)
    assert all(0 <= part.seconds < inf and 0 <= part.hidden_s < inf for part in time.parts), time.parts
    assert 0 < time.seconds < inf
    assert 0 < time.mfu <= 1, time.mfu
    assert time.tokens_per_s > 0
    if job.recipe.engine == "megatron":
        waits = replace(job.recipe.megatron, overlap_grad_reduce=False, overlap_param_gather=False, overlap_p2p_comm=False)
        alone = replace(job, recipe=replace(job.recipe, megatron=waits))
        assert time.seconds <= _time(alone).seconds * _ROUNDING, "what goes on beside costs"


#: Times are floats.
_ROUNDING = 1 + 1e-9


def a_step_written_out_sends_the_traffic(job: JobSpec, _: Random) -> None:
    """The requests of a step have the same payload as the traffic, for each collective operation and group of ranks."""
    answer, steps = answered(job), STEPS.get(job.recipe.engine, 0)
    short = job.model.num_hidden_layers * int(job.batch.grad_accum_steps) <= _WRITTEN_OUT
    if not_written(job) or not short:
        return
    fewer, more = (requests_of(job, number).calls for number in (steps, steps + 1))
    sent, expected = Counter[tuple[str, str, int]](), Counter[tuple[str, str, int]]()
    for call in more[len(fewer) :]:
        sent[call.operation, call.among, call.ranks] += call.n_bytes
    for one in answer.traffic.collectives:
        if int(one.group) > 1 and one.payload_bytes:
            ranks = 2 if one.among is Among.STAGES else int(one.group)  # the traffic's group is all stages
            expected[one.operation, one.among, ranks] += int(one.payload_bytes)
    assert sent == expected, {each: (sent[each], expected[each]) for each in {*sent, *expected} if sent[each] != expected[each]}


def _time(job: JobSpec) -> StepTime:
    answered(job)
    try:
        return step_time(account_of(job, job.batch), job.model, job.recipe, job.mesh, job.batch, job.cluster)
    except SpecError as error:
        raise Refused(str(error)) from None


# --- exported files read back --------------------------------------------------------------------------------------------

#: Settings that the files of a target contain. The check does not give them again as flags.
_SAID: dict[Target, tuple[str, ...]] = {
    "deepspeed": ("engine", "stage", "precision", "micro_batch", "grad_accum", "deepspeed", "offload_optimizer", "offload_param"),
    "accelerate": ("engine", "stage", "precision", "replicas", "offload_optimizer", "offload_param"),
    "torchtitan": (
        "model", "gpus", "engine", "stage", "precision", "replicas", "micro_batch", "grad_accum", "recompute", "optimizer",
        "optimizer_impl", "seq_len", "tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel",
        "pipeline_schedule", "offload_optimizer", "offload_param", "fsdp2", "loss", "keep_logits", "attention",
    ),
}  # fmt: skip
#: zeroplan's DeepSpeed options without a key in DeepSpeed's configuration.
_OURS = ("zero_init", "flatten_on_accelerator", "gpus_per_node")


def reads_back(job: JobSpec, draw: Random) -> None:
    """The files that zeroplan writes for another program can be read back, and give the same job."""
    targets: tuple[Target, ...] = tuple(target for target in TARGETS if not cannot_say(job.recipe, target))
    if not targets:
        raise Refused("no target has words for it")
    target = draw.choice(targets)
    if target == "torchtitan":
        job = _changed(job, model=published(draw.choice(("llama-3.1-8b", "qwen3-0.6b", "qwen3-30b-a3b"))))
    answered(job)
    try:
        made = export(job, target)
    except SpecError as error:
        raise Refused(str(error)) from None
    for file in made.files:
        if file.name.endswith(".py"):
            compile(file.text, file.name, "exec")
    if target == "megatron":
        assert all(line.startswith("--") for line in made.files[0].text.splitlines())
    elif target != "fsdp2":
        _read_again(job, target, made)


def _read_again(job: JobSpec, target: Target, made: Export) -> None:
    asked = request_of(job)
    write(made, folder(), force=True)
    name = made.files[-1 if target == "torchtitan" else 0].name
    if name.endswith(".py"):
        return  # a Python file, which zeroplan does not read
    file = str(folder() / name)
    named = {"deepspeed_config": file} if target == "deepspeed" else {"from_file": file}
    beside = replace(asked, **dict.fromkeys(_SAID[target]), **named)
    if job.recipe.engine == "deepspeed":
        default = DeepSpeedOptions()
        ours = {name: getattr(job.recipe.deepspeed, name) for name in _OURS}
        beside = replace(beside, deepspeed=replace(default, **ours), micro_batch=None, grad_accum=None)
    back = resolve(beside).job
    found, expected = _comparable(back), _comparable(job)
    assert found == expected, _differences(asdict(found), asdict(expected))


def _differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ between two jobs, by name."""
    differing: dict[str, tuple[Any, Any]] = {}
    for name, value in expected.items():
        if isinstance(value, dict) and isinstance(found[name], dict):
            differing |= {f"{name}.{inner}": both for inner, both in _differences(found[name], value).items()}
        elif found[name] != value:
            differing[name] = (found[name], value)
    return differing


def _comparable(job: JobSpec) -> JobSpec:
    """Return the job with all defaults filled in and without settings that have no effect."""
    recipe, options, fsdp2 = job.recipe, job.recipe.deepspeed, job.recipe.fsdp2
    impl = recipe.optimizer_impl or ("fused" if recipe.engine == "deepspeed" else "foreach")
    if recipe.engine == "deepspeed":
        impl = implementation_of(recipe)
        options = replace(options, torch_adam=recipe.optimizer in ADAM and options.torch_adam and impl == "fused")
    stage, kept = recipe.zero_stage, fsdp2.reshard_after_forward
    if recipe.engine == "fsdp2":
        kept = stage == 3 if kept is None else kept
        stage = 3 if kept else 2
    if recipe.precision not in ("bf16-mixed", "fp16-mixed"):
        fsdp2 = replace(fsdp2, reduce_dtype="fp32")
    if recipe.precision == "fp32":
        options = replace(options, grad_accum_dtype="param")
    for what in ("offload_optimizer", "offload_param"):
        heeded = {"none": (), "cpu": (f"{what}_pin_memory",), "nvme": tuple(asdict(options))}[getattr(options, what)]
        default = asdict(DeepSpeedOptions())
        options = replace(
            options, **{name: default[name] for name in default if name.startswith(f"{what}_") and name not in heeded}
        )
    fsdp2 = replace(fsdp2, reshard_after_forward=kept, torch=None)  # no file names torch's release
    fsdp2 = replace(fsdp2, modules="transformers")  # torchtitan's file is read as for transformers' modules
    fsdp2 = replace(fsdp2, ends_apart=False)  # accelerate and torchtitan decide this themselves
    schedule = recipe.pipeline_schedule or ("1f1b" if job.mesh.pp > 1 else None)
    each = recipe.pipeline_stages_per_rank or (stages_per_rank(schedule, None) if schedule else None)
    recipe = replace(recipe, pipeline_schedule=schedule, pipeline_stages_per_rank=each)
    recipe = replace(recipe, optimizer_impl=impl, zero_stage=stage, fsdp2=fsdp2, deepspeed=options)
    per_node = options.gpus_per_node if options.zero_quantized_gradients else None
    return replace(job, recipe=recipe, cluster=replace(job.cluster, gpus_per_node=per_node))


CHECKS: dict[str, Check] = {
    check.__name__.replace("_", "-"): check
    for check in (
        adds_up, is_explained, can_be_said, grid_is_its_points, grows_with_the_batch, grows_with_the_sequence, grows_with_layers,
        falls_with_ranks, falls_with_stage, falls_with_recomputation, stages_agree_on_one_rank, adapters_take_less,
        has_a_time, a_step_written_out_sends_the_traffic,
        reads_back,
    )
}  # fmt: skip
