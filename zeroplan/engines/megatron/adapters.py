"""Which parameters does a rank train if adapters are beside frozen weights? They are ms-swift's, of Megatron-Core's matrices."""

from collections.abc import Iterator

from zeroplan.engines.megatron.chunks import runs_of
from zeroplan.engines.megatron.parameters import head_of, is_expert, table_of
from zeroplan.numeric import Int
from zeroplan.spec.described import Job, JobParts
from zeroplan.spec.mesh import MeshSpec
from zeroplan.transformer.megatron import adapted_matrices, shared_width, symbols_of

NOTE = (
    "adapters follow mcore-bridge's code, compared with runs on Megatron-Core's own matrices; those of Transformer Engine and of "
    "grouped experts are read, not run; the step time is not modelled with them"
)


def trained_by(job: Job, counts: tuple[int, ...], *, is_first: bool, is_last: bool) -> tuple[Int, Int]:
    """Return the parameters that a rank trains: outside experts, with modules trained whole, and in adapters of experts.

    Source: mcore-bridge 1.6.5, tuners/lora.py, LoraParallelLinear.update_layer: each tensor-parallel rank has the whole of the
    matrix that reads or makes what these ranks do not split.
    """
    beside: Int = sum(_of_modules(job, is_first=is_first, is_last=is_last))
    experts: Int = 0
    for run, layers in zip(runs_of(job), counts, strict=True):
        once, each = _of_a_layer(job, routed=any(map(is_expert, run.parameters)))
        beside, experts = beside + layers * once, experts + layers * each
    return beside, experts


def _of_modules(job: Job, *, is_first: bool, is_last: bool) -> Iterator[Int]:
    """Yield the elements of the modules that this rank trains whole, in copies."""
    adapter = job.model.adapter
    if adapter is not None and is_first and adapter.trains("embedding"):
        yield table_of(job)
    if adapter is not None and is_last and adapter.trains("head"):
        yield head_of(job)[0]


def trained_count(job: Job) -> int:
    """Return the number of parameters that all ranks train together. [elements]"""
    whole = JobParts(job.model, job.recipe, MeshSpec(), job.batch)
    return int(sum(trained_by(whole, tuple(run.layers for run in runs_of(whole)), is_first=True, is_last=True)))


def of_each_shape(job: Job, kinds: tuple[int, ...], *, has_head: bool) -> Int:
    """Return the elements of one trained matrix of each shape, of adapters and of a head that is trained whole.

    ``kinds``: the number of layers of each kind. Adapters of the same shape in layers of several kinds are counted more than once.
    """
    found: Int = sum(_of_modules(job, is_first=False, is_last=has_head))
    for run, here in zip(runs_of(job), kinds, strict=True):
        if here:
            found = found + sum(_of_a_layer(job, routed=any(map(is_expert, run.parameters)), experts=1))
    return found


def _of_a_layer(job: Job, *, routed: bool, experts: int | None = None) -> tuple[Int, Int]:
    """Return a rank's parameters in the adapters of one layer: outside experts, and of its ``experts``, or else all of them."""
    model, names = job.model, adapted_matrices(job.model)
    at = {one.name: one.value for one in symbols_of(job)}
    hidden, rank = model.hidden_size, 0 if model.adapter is None else model.adapter.rank

    def of_mlp(width: Int) -> Int:
        return ("linear_fc1" in names) * (hidden + at["g_m"] * width) + ("linear_fc2" in names) * (width + hidden)

    beside: Int = ("linear_qkv" in names) * (hidden + at["q_r"] + at["k_r"] + at["v_r"])
    beside = beside + ("linear_proj" in names) * (at["c_r"] + hidden)
    if not routed:
        return rank * (beside + of_mlp(at["f_r"])), 0
    shared = of_mlp(at["f_s"]) if shared_width(job) else 0
    return rank * (beside + shared), rank * (at["E_r"] if experts is None else experts) * of_mlp(at["m_r"])
