"""The memory and traffic of a rank under DeepSpeed's ZeRO-3 (``DeepSpeedZeroOptimizer_Stage3``).

Every parameter is sharded separately: each rank holds ``ceil(numel/N)`` elements of it. The coordinator gathers a module's
parameters before it runs. Gradients go through one bucket, which is reduce-scattered in a separate copy.
"""

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.deepspeed.abandoned import abandoned_states, beside
from zeroplan.engines.deepspeed.infinity import note_on_nvme, nvme_lines, refuse_few_pipelined
from zeroplan.engines.deepspeed.offload import note, offloads_optimizer
from zeroplan.engines.deepspeed.secondary import second_partition
from zeroplan.engines.deepspeed.stage3.first import before_the_first_step, first_moments
from zeroplan.engines.deepspeed.stage3.job import Job, by_micro_batches, make_job, numels
from zeroplan.engines.deepspeed.stage3.reducing import flush_memory
from zeroplan.engines.deepspeed.stage3.states import (
    bucket_line,
    construction_moments,
    largest_packed,
    persistent_line,
    shares_held,
)
from zeroplan.engines.deepspeed.stage3.step import (
    cpu_step_moments,
    group_count,
    step_moments,
    step_temporaries,
    stepped_symbols,
)
from zeroplan.engines.deepspeed.stage3.traffic import collectives
from zeroplan.engines.deepspeed.stage3.training import Training
from zeroplan.engines.deepspeed.stage3_offload import host_lines, host_symbols, states_on_gpu
from zeroplan.engines.optimizers import counted
from zeroplan.engines.outside import buffers_and_pixels
from zeroplan.engines.passes import Passes, kept_in_a_block, kept_symbols, passes
from zeroplan.engines.rows import largest_parameter, shares
from zeroplan.ledger import Line, Moment, Phase
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import OptimizerImpl, RecipeSpec
from zeroplan.trace import Moments, Trace, entry_of


def sharded_account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, impl: OptimizerImpl) -> Account:
    """Return the account of stage 3.

    Leaves out leaf modules, and the padding of a gathered parameter (fewer than N elements each).
    """
    job = make_job(model, recipe, mesh)
    everything = shares_held(job, impl)
    left = abandoned_states(recipe, job.whole.n_elements, job.element)
    beside_shards = _beside_shards(model)
    on_gpu, others = states_on_gpu(recipe, everything), (*left, *buffers_and_pixels(model, recipe, batch), *beside_shards)
    states = (*on_gpu, *others)
    refuse_few_pipelined(recipe, group_count(job))
    persistent = (*states, bucket_line(job), persistent_line(job))
    these = passes(model, recipe, batch)
    trace = Trace()
    trace.hold("states", *persistent)
    jobs, taken = by_micro_batches(job, batch), flush_memory(job)
    for each in jobs:
        Training(trace, each, these, taken).run()
    later = trace.finished()
    from_the_start = before_the_first_step(recipe, on_gpu)
    first = first_moments(
        jobs, batch, these, taken, held=(*from_the_start, *others, bucket_line(job)), made_later=on_gpu[len(from_the_start) :],
        later=later,
    )  # fmt: skip
    temporaries = step_temporaries(job, impl)
    step = _step(job, impl, temporaries, (*states, bucket_line(job)))
    training = (*first, *later, *map(entry_of, step))
    moments = Moments((*map(entry_of, beside(construction_moments(job, states), (*left, *beside_shards))), *training))
    return Account(
        (*states, bucket_line(job), persistent_line(job)),
        moments,
        collectives(job, batch),
        host=host_lines(job, everything, temporaries),
        symbols=(*_symbols(job, impl), *host_symbols(job), *kept_symbols(these), *counted(*everything, *temporaries)),
        notes=(
            *note(recipe),
            *note_on_nvme(recipe),
            *((_PACKED_STAY,) if model.is_quantised else ()),
            *_bound(model, these, moments),
        ),
        nvme=tuple(nvme_lines(job)),
        kept=kept_in_a_block(these),
    )


_UPPER_BOUND = (
    "The peak is in the forward of a layer with experts. It is an upper bound there, up to 8 % above what was measured: "
    "DeepSpeed waits for the gathers of a layer's experts in an order that differs from run to run; zeroplan assumes the costliest"
)


_PACKED_STAY = (
    "Every rank has all weights in four bits gathered from the forward until the loss is freed: bitsandbytes keeps the weights "
    "that DeepSpeed releases"
)
_FROZEN_BOUND = (
    "The peak is in the forward, where frozen blocks keep nothing. It is an upper bound there: the most that is gathered in a "
    "block and the most that it makes are added up, though one may come after the other"
)


def _bound(model: ModelSpec, these: Passes, moments: Moments) -> tuple[str, ...]:
    """Return a note if the peak is only an upper bound, because it depends on set iteration or on the order of gathers."""
    keeps_nothing = model.frozen is not None and any(not one.kept for one in these.kinds)
    if not (model.moe or keeps_nothing):
        return ()
    highest = moments.highest_entry
    if highest is None:
        return ()
    if keeps_nothing:
        at_first = highest.phase is Phase.FIRST and highest.of_forward
        return (_FROZEN_BOUND,) if highest.phase is Phase.FORWARD or at_first else ()
    return (_UPPER_BOUND,) if highest.phase is Phase.FORWARD else ()


def _step(job: Job, impl: OptimizerImpl, temporaries: tuple[Line, ...], held: tuple[Line, ...]) -> tuple[Moment, ...]:
    """Return the moments of the optimizer's step beside the lines ``held``. The second partition lives until the last of them."""
    steps = cpu_step_moments(job) if offloads_optimizer(job.recipe) else step_moments(job, impl, temporaries)
    second = second_partition(job.recipe, job.element, job.partition, job.n_ranks)
    return tuple([moment.beside((*held, *second)) for moment in steps[:-1]] + [moment.beside(held) for moment in steps[-1:]])


def _beside_shards(model: ModelSpec) -> tuple[Line, ...]:
    """Return the tensors that dequantise 4-bit weights, which DeepSpeed does not manage."""
    if not model.is_quantised:
        return ()
    from zeroplan.engines.quantised import scales_of  # noqa: PLC0415  keeps start-up fast

    return scales_of(model)


def _symbols(job: Job, impl: OptimizerImpl) -> tuple[Symbol, ...]:
    trained = "" if job.every is job.whole else " that is trained"
    return (
        *(() if job.every is job.whole else _of_frozen(job)),
        Symbol("G_r", job.partition, f"elements of this rank's share: ceil(elements/N) of every parameter{trained}"),
        *stepped_symbols(job, impl),
        Symbol("B", job.recipe.deepspeed.reduce_bucket_size, "reduce_bucket_size"),
        Symbol("G_max", largest_parameter(job.every), "elements of the largest parameter"),
        Symbol("G_first", job.every.placed[0].end, "elements of the first parameter"),
        Symbol("G_keep", job.trace.persistent, "elements of the parameters below stage3_param_persistence_threshold"),
    )


def _of_frozen(job: Job) -> tuple[Symbol, ...]:
    packed = f", four bits as numbers of {job.element} bytes" if job.every.model.is_quantised else ""
    return (
        *_of_quantised(job),
        Symbol("G_w", shares(numels(job.every), job.n_ranks), f"elements of this rank's share of all parameters{packed}"),
        Symbol("G_one", largest_parameter(job.whole), "elements of the largest parameter that is trained"),
    )


def _of_quantised(job: Job) -> tuple[Symbol, ...]:
    if not job.every.model.is_quantised:
        return ()
    from zeroplan.engines.quantised import quantised_symbols  # noqa: PLC0415  keeps start-up fast

    return (
        Symbol("Ψ_w", job.every.n_elements, f"elements of all parameters, four bits as numbers of {job.element} bytes"),
        Symbol("G_4", largest_packed(job), "elements of the largest weight in four bits"),
        *quantised_symbols(job.every.model),
    )
