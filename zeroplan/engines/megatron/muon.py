"""What does Muon keep, and what do its Newton-Schulz iterations allocate?"""

from collections.abc import Iterator

from zeroplan.engines.formulas import sized
from zeroplan.engines.megatron.whole_matrices import Owned
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div, maximum, where
from zeroplan.spec.described import Job
from zeroplan.transformer.megatron import is_gated

MUON = "Megatron-LM 2026-08, megatron/core/optimizer/__init__.py, _get_megatron_emerging_optimizer"
ITERATES = "Emerging-Optimizers 2026-08, orthogonalized_optimizers/muon_utils.py, newton_schulz_tp"


def muon_states(owned: Owned) -> Iterator[Line]:
    """Yield Muon's momentum of matrices, and Adam's states of all other parameters. [bytes]"""
    yield sized(Kind.OPTIMIZER_STATE, 4, owned.matrices, "Muon's momentum of matrices", MUON, "Y_own")
    reason = "Adam's momentum and variance of embedding, head and vectors"
    yield sized(Kind.OPTIMIZER_STATE, 8, owned.others, reason, MUON, "A_own")


def muon_step(job: Job) -> Line:
    """Return the memory of the Newton-Schulz iterations for the largest matrix. Every tensor-parallel rank gathers it.

    A rank holds its update, the gathered parts and the whole matrix in fp32. In addition it holds the iterate in fp32 and bf16, or
    two bf16 iterates and two products, whichever is more.
    """
    most: Int = 0
    for (rows, columns), ranks in largest_matrices(job):
        whole, product = rows * columns, min(rows, columns) ** 2
        again = 4 * ceil_div(whole, ranks) + where(ranks > 1, 8 * whole, 0) + max(6 * whole, 4 * whole + 4 * product)
        most = maximum(most, again)
    return Line(Kind.OPTIMIZER_TEMPORARY, most, "Newton-Schulz iterates of the largest matrix", "Y_step", ITERATES)


def largest_matrices(job: Job) -> Iterator[tuple[tuple[int, int], Int]]:
    """Yield the rows and columns of a layer's large matrices, and the number of ranks that split each."""
    model, mesh = job.model, job.mesh
    gates, hidden, mla = 2 if is_gated(job) else 1, model.hidden_size, model.mla
    if mla is None:
        yield ((model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim, hidden), mesh.tp
    else:
        yield (model.num_attention_heads * mla.v_head_dim, hidden), mesh.tp
    if model.moe is None or model.moe.num_dense_layers:
        yield (gates * model.intermediate_size, hidden), mesh.tp
    if model.moe is not None:
        yield (gates * model.moe.moe_intermediate_size, hidden), job.recipe.megatron.expert_ways(int(mesh.tp))
