"""What does a rank send in a step?"""

from collections.abc import Iterator
from math import comb

from zeroplan.engines.megatron.chunks import runs_of
from zeroplan.engines.megatron.parameters import Bytes, bytes_of, has_tied_head, table_of
from zeroplan.engines.megatron.rank import Rank, same_experts
from zeroplan.engines.megatron.sharded import Sharding, sharding_of
from zeroplan.ledger import Among, Collective, Phase
from zeroplan.numeric import Int, ceil_div, for_each_value, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.described import Job
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.megatron import (
    ROUTED,
    adapted_matrices,
    element_of,
    encoder_length,
    own_part,
    tokens_of,
)
from zeroplan.transformer.params import is_frozen
from zeroplan.transformer.published import KORTHIKANTI

VOLUME = f"{KORTHIKANTI}, section 4.2; Narayanan et al. 2021, arXiv:2104.04473, section 3"


def collectives_of(rank: Rank, job: Job) -> Iterator[Collective]:
    """Yield the collectives of a rank per step. Left out: single numbers, counts of tokens, gradients of norms."""
    yield from collectives_of_weights(rank, job)
    yield from collectives_of_passes(rank, job)


def collectives_of_weights(rank: Rank, job: Job) -> Iterator[Collective]:
    """Yield the collectives of :func:`collectives_of` that reduce gradients and gather weights."""
    recipe, mesh = job.recipe, job.mesh
    width, beside = bytes_of(recipe), mesh.dp_shard * mesh.cp
    together = job.model.moe is None or recipe.megatron.overlap_param_gather
    times = 1 if together else where(mesh.ep > 1, 2, 1)  # experts have their own optimizer; each optimizer gathers all weights
    parts = [("parameters", Among.SHARDS, beside, rank.elements + rank.padding)]
    if job.model.moe is not None:
        parts.append(("experts", Among.SHARDS_OF_EXPERTS, same_experts(job), rank.experts))
    sharding = sharding_of(rank, job)
    for what, among, ranks, elements in parts:
        if sharding is None:
            yield from _of_gradients(what, among, width, recipe, ranks, elements, times)
        else:
            yield from _of_shards(sharding, what, among, ranks, elements, job.batch)


def collectives_of_passes(rank: Rank, job: Job) -> Iterator[Collective]:
    """Yield the collectives of :func:`collectives_of` within layers and between pipeline stages.

    Raises SpecError for a precision that is not modelled with Megatron-Core.
    """
    recipe, batch = job.recipe, job.batch
    bytes_of(recipe)
    yield from _within_layers(rank, job)
    if int(job.mesh.pp) > 1:
        tokens = own_part(batch.micro_batch_size * batch.seq_len, job)
        for phase, is_end in ((Phase.FORWARD, rank.has_head), (Phase.BACKWARD, rank.at == 0)):
            calls = batch.grad_accum_steps * (len(rank.stages) - is_end)  # the first and the last stage have one neighbour
            if not (isinstance(calls, int) and not calls):
                yield _sent(
                    "hidden states to the next stage",
                    phase,
                    Among.STAGES,
                    2,
                    calls,
                    element_of(recipe) * tokens * job.model.hidden_size,
                )
        shared = has_tied_head(job) or recipe.megatron.mtp_num_layers
        if shared and job.model.adapter is None and (rank.at == 0 or rank.has_head):
            gradient = bytes_of(recipe).gradient * table_of(job)
            what = "gradient of the table that first and last stage share"
            yield _call("all_reduce", what, Phase.BACKWARD, Among.STAGES, 2, 1, gradient, passes=2)


def _of_gradients(
    what: str, among: Among, width: Bytes, recipe: RecipeSpec, ranks: Int, elements: Int, times: Int
) -> Iterator[Collective]:  # fmt: skip
    gradients: Int = width.gradient * elements
    if not recipe.zero_stage or not recipe.megatron.use_layer_wise_param_layout:
        yield _call("all_reduce", f"gradients of {what}", Phase.BACKWARD, among, ranks, 1, gradients, passes=2)
    else:
        yield _call("reduce_scatter", f"gradients of {what}", Phase.BACKWARD, among, ranks, 1, gradients)
    if recipe.zero_stage:
        yield _call("all_gather", what, Phase.STEP, among, ranks, times, width.weight * elements)


def _of_shards(
    sharding: Sharding, what: str, among: Among, ranks: Int, elements: Int, batch: Batch
) -> Iterator[Collective]:  # fmt: skip
    """Yield Megatron-FSDP's collectives. Every micro-batch reduces gradients, and at stage 3 gathers the layers' weights."""
    calls, gradients = batch.grad_accum_steps, sharding.width_of_gradient * elements
    yield _call("reduce_scatter", f"gradients of {what}", Phase.BACKWARD, among, ranks, calls, gradients)
    if not sharding.gathers:
        yield _call("all_gather", what, Phase.STEP, among, ranks, 1, sharding.width * elements)
        return
    ends = 0 if among is Among.SHARDS_OF_EXPERTS else sharding.ends
    if not (isinstance(ends, int) and not ends):
        yield _call("all_gather", f"{what} beside layers", Phase.STEP, among, ranks, 1, sharding.width * ends)
    for phase, gathered in zip(
        (Phase.FORWARD, Phase.BACKWARD), sharding.gathered_per_micro_batch(elements - ends), strict=True
    ):
        if not (isinstance(gathered, int) and not gathered):
            yield _call("all_gather", f"{what} of layers", phase, among, ranks, calls, sharding.width * gathered)


def _within_layers(rank: Rank, job: Job) -> Iterator[Collective]:
    """Yield the collectives within layers.

    Tensor parallelism has two all-reduces per layer and pass. Sequence parallelism has as many all-gathers and reduce-scatters
    instead, and its backward gathers the matrices' inputs once more.
    """
    recipe, batch = job.recipe, job.batch
    calls = batch.grad_accum_steps * rank.layers
    forwards = 2 if recipe.recompute == "full" else 1
    tokens = tokens_of(job)
    hidden = element_of(recipe) * tokens * job.model.hidden_size
    pairs = calls * (2 if recipe.megatron.hybrid_layer_pattern is None else 1)  # column-parallel and row-parallel matrix
    for phase, passes in ((Phase.FORWARD, 1), (Phase.BACKWARD, forwards)):
        adapter = job.model.adapter
        yield from _between_tensor_ranks(job, phase, passes * pairs, pairs if adapter is None else 0, hidden)
        if adapter is not None:  # frozen matrices do not read their inputs again; adapters have a product on either side
            between = element_of(recipe) * tokens * adapter.rank
            each = calls * ceil_div(len(adapted_matrices(job.model)), 2)
            yield from _between_tensor_ranks(job, phase, passes * each, each, between)
    yield from _at_ends(rank, job, hidden)
    if recipe.megatron.pretrains == "t5":
        yield from _within_t5(calls, job)
    yield from _around_rings(job, calls, forwards, tokens)
    if job.model.moe is not None:
        yield from _to_experts(rank, job)


def _at_ends(rank: Rank, job: Job, hidden: Int) -> Iterator[Collective]:
    """Yield the collectives of tensor-parallel ranks around embedding and head.

    The ranks sum the embedded tokens, the gradient of the head's input and the numbers of the loss. Sequence parallelism replaces
    the first two sums by reduce-scatters (with learned positions only the second), and gathers what they split. Modules for later
    tokens embed and score once more each, on the last rank.
    """
    mesh, batch, modules = job.mesh, job.batch, job.recipe.megatron.mtp_num_layers
    calls, split = batch.grad_accum_steps, job.recipe.sequence_parallel
    tables = (rank.at == 0) + modules * rank.has_head
    embedded = "embedded tokens", Among.TENSOR, mesh.tp, tables * calls
    head = "the head's input", Among.TENSOR, mesh.tp, (1 + modules) * calls

    def send(operation: str, phase: Phase, which: tuple[str, Among, Int, Int], payload: Int) -> Collective:
        what, among, ranks, times = which
        passes = 2 if operation == "all_reduce" else 1
        return _call(operation, what, phase, among, ranks, times, payload, passes=passes, near=True)

    if tables:
        yield send("reduce_scatter" if split and not job.model.positions else "all_reduce", Phase.FORWARD, embedded, hidden)
        if split and not is_frozen(job.model, "embedding"):
            yield send("all_gather", Phase.BACKWARD, embedded, hidden)
    if rank.has_head:
        if split:
            yield send("all_gather", Phase.FORWARD, head, hidden)
            if not is_frozen(job.model, "head"):
                yield send("all_gather", Phase.BACKWARD, head, hidden)
        yield send("reduce_scatter" if split else "all_reduce", Phase.BACKWARD, head, hidden)
        numbers = "numbers of the loss", Among.TENSOR, mesh.tp, 3 * head[3]
        yield send("all_reduce", Phase.FORWARD, numbers, 4 * tokens_of(job))
    if modules and rank.has_head:
        yield from _joined(job, hidden)


def _joined(job: Job, hidden: Int) -> Iterator[Collective]:
    """Yield what a module for later tokens sends around the matrix that joins hidden states with the next tokens' embedding.

    Source: Megatron-Core 0.16, transformer/multi_token_prediction.py, _concat_embeddings; read, not run.
    """
    which = Among.TENSOR, job.mesh.tp, job.recipe.megatron.mtp_num_layers * job.batch.grad_accum_steps
    yield _call("all_gather", "joined hidden states", Phase.FORWARD, *which, hidden, near=True)
    if not job.recipe.sequence_parallel:
        yield _call("all_reduce", "inputs that are joined", Phase.BACKWARD, *which, 2 * hidden, passes=2, near=True)
        return
    for operation, phase in (("all_gather", Phase.FORWARD), ("all_gather", Phase.BACKWARD), ("reduce_scatter", Phase.BACKWARD)):
        yield _call(operation, "inputs that are joined", phase, *which, 2 * hidden, near=True)


def _within_t5(calls: Int, job: Job) -> Iterator[Collective]:
    """Yield T5's sums beyond two per decoder layer: of cross attention, of encoder layers, and of the encoder output's gradient."""
    batch = job.batch
    per_token = element_of(job.recipe) * batch.micro_batch_size * job.model.hidden_size
    hidden, encoded = per_token * batch.seq_len, per_token * encoder_length(job)
    of_encoder = 2 * batch.grad_accum_steps * runs_of(job)[0].layers
    for phase, read in ((Phase.FORWARD, 0), (Phase.BACKWARD, calls)):
        yield from _between_tensor_ranks(job, phase, calls, 0, hidden)
        yield from _between_tensor_ranks(job, phase, of_encoder + read, 0, encoded)


def _between_tensor_ranks(job: Job, phase: Phase, sums: Int, pairs: Int, hidden: Int) -> Iterator[Collective]:
    what = "hidden states", phase, Among.TENSOR, job.mesh.tp
    if not job.recipe.sequence_parallel:
        yield _call("all_reduce", *what, sums, hidden, passes=2, near=True)
        return
    inputs = pairs if phase is Phase.BACKWARD else 0
    yield _call("all_gather", *what, sums + inputs, hidden, near=True)
    yield _call("reduce_scatter", *what, sums, hidden, near=True)


def _around_rings(job: Job, calls: Int, forwards: int, tokens: Int) -> Iterator[Collective]:
    """Yield the keys and values that context-parallel ranks send around a ring, with their gradients in the backward.

    zeroplan counts ``cp_comm_type p2p`` for every job.
    """
    mesh = job.mesh
    keys = ceil_div(2 * element_of(job.recipe) * tokens * job.model.num_key_value_heads * job.model.head_dim, mesh.tp)
    steps = mesh.cp - 1
    yield _sent("keys and values around the ring", Phase.FORWARD, Among.SEQUENCE, mesh.cp, calls * steps, keys)
    yield _sent(
        "keys and values around the ring", Phase.BACKWARD, Among.SEQUENCE, mesh.cp, (1 + forwards) * calls * steps, keys
    )


def visited(job: Job, places: Int) -> Int:
    """Return how many of ``places``, which share the experts equally, one token visits, in thousandths.

    A token chooses its experts at random from its groups of experts. DeepEP and HybridEP send it once to each rank and, between
    nodes, once to each node (github.com/deepseek-ai/DeepEP at 94a9f8f6, docs/README_Hybrid-EP.md); all-to-alls send it once to
    each expert.
    """
    moe, groups, chosen = job.model.moe, job.recipe.megatron.moe_router_num_groups, job.recipe.megatron.moe_router_group_topk
    assert moe is not None  # noqa: S101  asked of models with experts only
    choices = moe.num_experts_per_tok

    def of(count: int) -> int:
        others = groups - max(1, groups // count)
        reached = max(1.0, count * (1 - comb(others, chosen) / comb(groups, chosen)))
        return round(1000 * reached * (1 - (1 - 1 / reached) ** choices))

    return for_each_value(of, places)


def _to_experts(rank: Rank, job: Job) -> Iterator[Collective]:
    model, batch = job.model, job.batch
    assert model.moe is not None  # noqa: S101  asked of models with experts only
    forwards = 2 if job.recipe.recompute == "full" else 1
    tokens = own_part(batch.micro_batch_size * batch.seq_len, job)
    flex = job.recipe.megatron.moe_token_dispatcher_type in ("flex", "deepep")
    copies = visited(job, job.mesh.ep) if flex else 1000 * model.moe.num_experts_per_tok
    payload = element_of(job.recipe) * tokens * copies * model.hidden_size // 1000
    counts = zip(runs_of(job), rank.counts, strict=True)
    calls = batch.grad_accum_steps * sum(layers for run, layers in counts if run.kind in ROUTED)
    yield _call("all_to_all", "tokens", Phase.FORWARD, Among.EXPERTS, job.mesh.ep, 2 * calls, payload)
    yield _call("all_to_all", "tokens", Phase.BACKWARD, Among.EXPERTS, job.mesh.ep, 2 * forwards * calls, payload)


def _call(
    operation: str, what: str, phase: Phase, among: Among, ranks: Int, calls: Int, payload: Int, *, passes: int = 1,
    near: bool = False,
) -> Collective:  # fmt: skip
    """Return a collective of a group. Each rank keeps its own part of the payload and sends the others."""
    sent = calls * passes * (payload - payload // ranks)
    volume = where(ranks > 1, passes * calls * payload // 2, 0)
    when = "after the step" if phase is Phase.STEP else phase.value
    return Collective(operation, what, when, ranks, calls, payload, sent, volume, VOLUME, near=near, phase=phase, among=among)


def _sent(what: str, phase: Phase, among: Among, ranks: Int, calls: Int, payload: Int) -> Collective:
    """Return a send of the whole payload from one rank to another."""
    sent: Int = calls * payload
    return Collective("send", what, phase.value, ranks, calls, payload, sent, sent // 2, VOLUME, phase=phase, among=among)
