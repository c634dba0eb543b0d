"""The memory that a rank keeps from step to step under ZeRO-3, and the allocations of its construction."""

from collections.abc import Callable

from zeroplan.engines.deepspeed.infinity import sub_groups
from zeroplan.engines.deepspeed.offload import kept_as, offloads_optimizer, on_host
from zeroplan.engines.deepspeed.sources import STAGE3
from zeroplan.engines.deepspeed.stage3.job import Job, if_several, numels, unless_alone
from zeroplan.engines.formulas import for_ranks, sized, times
from zeroplan.engines.optimizers import LocalTensor, state_lines
from zeroplan.engines.published_optimizers import PUBLISHED
from zeroplan.engines.rows import largest_parameter, shares
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import ceil_div, where
from zeroplan.spec.recipe import OptimizerImpl
from zeroplan.transformer.params import layout

_GATHER = "DeepSpeed 0.19.8, runtime/zero/partition_parameters.py"
_MASTER = f"{STAGE3}, _create_fp32_partitions"
_GRADIENTS = f"{STAGE3}, grad_partitions_flat_buffer"
_ZEROS = f"{STAGE3}, initialize_optimizer_states"
_LOADED = "transformers 5.23, integrations/bitsandbytes.py, Bnb4bitQuantize"
_PERSISTENT = f"{STAGE3}, _post_step"


def shares_held(job: Job, impl: OptimizerImpl) -> tuple[Line, ...]:
    """Return this rank's shards of weights, master copy, gradients and the optimizer's states."""
    share, symbol = job.partition, "G_r" if job.every is job.whole else "G_w"
    held = share if job.every is job.whole else shares(numels(job.every), job.n_ranks)
    weights = sized(Kind.PARAMETERS, job.element, held, "this rank's share of each parameter", STAGE3, symbol)
    reason = "this rank's share of the weights once more, as the optimizer updates them"
    master = sized(Kind.OPTIMIZER_STATE, job.master, share, reason, _MASTER, "G_r")
    gradients = sized(Kind.GRADIENTS, job.kept, share, "this rank's share of the gradients", _GRADIENTS, "G_r")
    kept, whole = kept_as(job.recipe, impl), (LocalTensor((share,), in_block=False),)

    def states(tensors: tuple[LocalTensor, ...]) -> tuple[Line, ...]:
        return state_lines(job.recipe.optimizer, kept, tensors, job.master, symbol="G_r")

    optimizer = of_groups(job, states) if job.recipe.optimizer in PUBLISHED else states(whole)
    return (weights, master, gradients, *optimizer)


def of_groups(job: Job, make: Callable[[tuple[LocalTensor, ...]], tuple[Line, ...]]) -> tuple[Line, ...]:
    """Return lines about what the optimizer updates: one flat tensor for every sub-group of this rank's shards."""

    def at(ranks: int) -> tuple[Line, ...]:
        groups = sub_groups(job.whole, job.recipe.deepspeed.sub_group_size, ranks)
        return make(tuple([LocalTensor((sum(group),), in_block=False) for group in groups]))

    return for_ranks(at, job.n_ranks)


def bucket_line(job: Job) -> Line:
    """Return the bucket into which gradients are copied."""
    options = job.recipe.deepspeed
    elements = options.reduce_bucket_size if options.contiguous_gradients else 0
    formula = times(job.element, "B") if options.contiguous_gradients else "0"
    return Line(Kind.REDUCE, job.element * elements, "reduce bucket, reduce_bucket_size, kept for good", formula, STAGE3)


def persistent_line(job: Job) -> Line:
    """Return the parameters that stay gathered."""
    n_bytes = unless_alone(job, job.element * job.trace.persistent)
    reason = "parameters below the persistence threshold, gathered from step to step"
    return Line(Kind.GATHER, n_bytes, reason, times(job.element, f"G_keep{if_several(job)}"), _PERSISTENT)


def largest_packed(job: Job) -> int:
    """Return the elements of the largest weight in four bits before it is packed; 0 if there is none."""
    tree = layout(job.every.model)
    return max((one.numel for run in tree.runs for one in run.parameters if one.quantised), default=0)


def _unpacked(job: Job) -> tuple[Line, ...]:
    """Return the last weight that transformers quantises, when all others are quantised."""
    if not job.every.model.is_quantised:
        return ()
    reason = "largest weight before it is put into four bits"
    return (sized(Kind.PARAMETERS, job.element, largest_packed(job), reason, _LOADED, "G_4"),)


def construction_moments(job: Job, states: tuple[Line, ...]) -> tuple[Moment, ...]:
    """Return the moments of construction: the whole model, or its parts under ``zero.Init``; then the optimizer's tensors.

    transformers never builds a quantised model under ``zero.Init`` (5.23, modeling_utils.py, ``get_init_context``).
    """
    share = job.partition
    largest = job.element * largest_parameter(job.every)
    if job.recipe.deepspeed.zero_init and not job.every.model.is_quantised:
        arrived = Line(
            Kind.PARAMETERS, largest, "largest parameter before it is split", times(job.element, "G_max"), f"{_GATHER}, Init"
        )
        model = Moment("initialisation: model built under zero.Init", Phase.INIT, (states[0], arrived))
    else:
        psi = "Ψ_w" if job.every.model.is_quantised else "Ψ"
        whole = sized(Kind.PARAMETERS, job.element, job.every.n_elements, "the whole model", _GATHER, psi)
        first = job.every.placed[0].end
        split = job.element * where(job.n_ranks > 1, ceil_div(first, job.n_ranks), largest_parameter(job.every))
        piece = "ceil(G_first/N)" if not isinstance(job.n_ranks, int) or job.n_ranks > 1 else "G_max"
        formula = times(job.element, piece)
        share_of_one = Line(Kind.PARAMETERS, split, "first share split off", formula, f"{_GATHER}, _partition_param")
        model = Moment("initialisation: model arrives whole", Phase.INIT, (whole, share_of_one, *_unpacked(job)))
    zeros = sized(Kind.GRADIENTS, job.master, share, "zero gradients of the share", _ZEROS, "G_r")
    zeros = on_host(zeros) if offloads_optimizer(job.recipe) else zeros
    reason = "largest parameter, gathered to hook its gradient"
    one = Line(Kind.GATHER, largest, reason, times(job.element, "G_max"), f"{STAGE3}, __init__")
    return (
        model,
        Moment("initialisation: optimizer", Phase.INIT, (*states[:2], zeros)),
        Moment("initialisation: gradient hooks", Phase.INIT, (*states[:3], bucket_line(job), one)),
    )
