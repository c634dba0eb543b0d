"""What do DeepSpeed's Muon and the Adam beside it keep at stages 1 and 2, and what does an update of a matrix allocate?

There are two parameter groups, each laid flat and padded by itself: the matrices, then all other parameters. A rank updates its
share of each. It keeps the momentum of every matrix that reaches into its share whole, since it computes the whole update.

Ranks differ in the matrices that they keep. Figures are those of the rank with most, and bounds for every rank: its gradients
are alive from the first reduction on. The temporaries are those of the operations one by one. DeepSpeed compiles them, and the
compiled code needs no more (read, not run on a GPU). Source: DeepSpeed 0.19.8, ``runtime/zero/muon/original_muon.py`` and
``runtime/zero/stage_1_and_2.py``.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from zeroplan.engines.account import Symbol
from zeroplan.engines.deepspeed.sources import STAGE12
from zeroplan.engines.formulas import sized
from zeroplan.engines.optimizers import LocalTensor, state_lines
from zeroplan.engines.rows import Row, in_two_groups, most_touched, numel, of_ranks, share_elements, trained_row
from zeroplan.errors import SpecError
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.parameters import Parameter
from zeroplan.transformer.params import has_frozen

if TYPE_CHECKING:
    from zeroplan.engines.deepspeed.stage12_lines import Job

SHARES = "(P_muon + P_adam)"
"""A rank's shares of both groups, in formulas."""
UPDATE = "DeepSpeed 0.19.8, runtime/zero/muon/original_muon.py, muon_update"
_HALF = 2
"""Bytes of an element in the iterations, which run in fp16 (``ns_compute_dtype``)."""
_LEFT_TO_ADAM = ("embed", "lm_head")


def refuse_with_muon(model: ModelSpec, recipe: RecipeSpec) -> None:
    """Raise SpecError for what is not modelled together with DeepSpeed's Muon."""
    options = recipe.deepspeed
    for said, instead in (
        (recipe.zero_stage not in (1, 2) and f"ZeRO stage {recipe.zero_stage}", "stage 1 or 2"),
        (recipe.offloads_states and "offload to the host", "optimizer 'adamw'"),
        (options.grad_accum_dtype == "fp32" and "grad_accum_dtype 'fp32'", "'param'"),
        (not options.contiguous_gradients and "contiguous_gradients=False", "True"),
        (options.torch_adam and "torch_adam", "DeepSpeed's own Adam"),
        (recipe.optimizer_impl not in (None, "fused") and f"optimizer_impl {recipe.optimizer_impl!r}", "'fused'"),
        (model.profile is not None and "a profile", "a known family"),
        (model.vision is not None and "a vision tower", "optimizer 'adamw'"),
        (has_frozen(model) and "adapters or frozen weights", "optimizer 'adamw'"),
    ):
        if said:
            raise SpecError(f"{said} with optimizer 'muon' under engine 'deepspeed' is not modelled; use {instead}")
    if any(len(each.parameter.shape) > 2 for each in trained_row(model).placed):
        raise SpecError(
            "weights of three dimensions (experts, convolutions) with optimizer 'muon' under engine 'deepspeed' are not modelled; "
            "use optimizer 'adamw'"
        )


@lru_cache(maxsize=256)
def row_of_muon(model: ModelSpec) -> Row:
    """Return the trained parameters in two groups: Muon's matrices, then Adam's parameters (``set_optimizer_flags``)."""

    def is_by_muon(one: Parameter) -> bool:
        return len(one.shape) > 1 and not any(word in one.name.lower() for word in _LEFT_TO_ADAM)

    return in_two_groups(trained_row(model), is_by_muon)


def shares(job: "Job") -> tuple[Int, Int]:
    """Return this rank's padded shares of both groups. [elements]"""
    muon, adam = (share_elements(group, job.n_ranks) for group in job.whole.groups)
    return muon, adam


def own_matrices(job: "Job") -> Int:
    """Return the elements of all matrices that reach into the share of the rank with most of them, each whole."""
    return most_touched(job.whole, 0, job.n_ranks)


def states_beside_muon(job: "Job") -> tuple[Line, ...]:
    """Return Muon's momenta, the copy into which a step writes them until it is known to succeed, and Adam's states. [bytes]"""
    whole = "of every matrix that reaches into this rank's share, each whole"
    kept, copied = f"{STAGE12}, _muon_momentum_buffer", f"{STAGE12}, _muon_staging_momentum"
    momentum = sized(Kind.OPTIMIZER_STATE, job.element, own_matrices(job), f"Muon's momentum {whole}", kept, "G_muon")
    return (
        momentum,
        momentum._replace(reason=f"copy of the momentum {whole}", source=copied),
        *state_lines("adamw", "fused", (LocalTensor((shares(job)[1],), in_block=False),), job.master, symbol="P_adam"),
    )


def updates(job: "Job") -> Line:
    """Return Muon's updates of whole matrices, from the end of the backward to the step. [bytes]"""
    reason = "Muon's updates of every matrix that reaches into this rank's share, each whole"
    return sized(Kind.GRADIENTS, job.element, own_matrices(job), reason, f"{STAGE12}, get_flat_partition", "G_muon")


def symbols_of_muon(job: "Job") -> tuple[Symbol, ...]:
    """Return the symbols in the formulas of Muon's two groups."""
    muon, adam = shares(job)
    return (
        Symbol("P_muon", muon, "elements of this rank's share of Muon's matrices, padded"),
        Symbol("P_adam", adam, "elements of this rank's share of all other parameters, padded"),
        Symbol("G_muon", own_matrices(job), "elements of every matrix of Muon that reaches into this rank's share, each whole"),
    )


@lru_cache(maxsize=512)
def most_at_once(whole: Row, ranks: int, element: int, *, is_fp16: bool) -> tuple[int, int]:
    """Return the updates so far and the temporaries of the next, where they take most on any rank, matrix by matrix. [bytes]"""
    most = 0, 0
    for inside in of_ranks(whole, 0, ranks):
        done = 0
        for each in inside:
            rows, columns = map(int, each.parameter.shape)
            most = max(most, (done, most_in_update(rows, columns, element, is_fp16=is_fp16)), key=sum)
            done += element * numel(each)
    return most


@lru_cache(maxsize=512)
def most_in_update(rows: int, columns: int, element: int, *, is_fp16: bool) -> int:
    """Return the most that ``muon_update`` and ``zeropower_via_gram_newtonschulz`` allocate at once, with the update. [bytes]

    >>> most_in_update(4, 8, 2, is_fp16=False)  # an iterate and seven Gram matrices
    288
    """
    return max(_alive_in_update(rows, columns, element, is_fp16=is_fp16))


def _alive_in_update(rows: int, columns: int, element: int, *, is_fp16: bool) -> Iterator[int]:
    both, gram = rows * columns, min(rows, columns) ** 2
    yield (element + 3) * both  # torch.isfinite: an absolute value and three masks
    yield 2 * element * both  # the new momentum, and what is chosen of it
    wide = 4 if is_fp16 else element
    yield ((wide if is_fp16 else 0) + wide + _HALF) * both  # cast, normalised, cast
    if rows == columns:
        yield 6 * _HALF * gram
    else:
        yield _HALF * max(both + 7 * gram, 2 * both + 4 * gram)
    yield 2 * element * both  # the update, and what is chosen of it
