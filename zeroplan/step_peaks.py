"""If sequences differ in length: how high is a step's peak, in how many steps does memory run out, and what would help?

A step's peak is the highest over its ranks and micro-batches. The estimator gives the memory of a micro-batch; this module gives
the share of steps whose longest micro-batch has a given length. For the longest sequence of a step that distribution is exact
over all orders of the data. For sums of sequences, orders are drawn with a fixed seed, or all are tried if there are few.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import permutations
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, needed
from zeroplan.numeric import ceil_div, round_up
from zeroplan.resolve.batching import MOST_PLACED, PACKED_AT_ONCE, Batching, Column, Varying, budgeted, largest, packed
from zeroplan.spec.batch import Columns
from zeroplan.spec.job import JobSpec

Shares: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

#: The most orders to draw, the most sequences in all orders together, and the same under a token budget.
_ORDERS, _DRAWN, _BUDGETED = 199, 2_000_000, 5_000
_MOST_SHAPES: Final = 1024
_STEP_OF_A_CAP, _STEP_OF_A_BUDGET = 64, 1024
#: The share of sequences that a suggested cut leaves whole. If all steps fit, a cut is suggested only below 0.9 of the longest.
_WHOLE, _WORTH_IT = 0.99, 0.9
#: Shares are sums of floats.
_SLACK: Final = 1e-9


class Peaks(NamedTuple):
    """One way of batching, and the allocated peaks of its steps. [bytes]"""

    flags: str  # flags to add to the job for it; empty for the job's own batching
    batching: Batching
    median_bytes: int
    of_90_in_100_bytes: int
    of_99_in_100_bytes: int
    highest_bytes: int  # over all orders, drawn or not
    longest: int  # tokens of the longest micro-batch: of each of its sequences if they are padded, else of all
    runs_out: float | None  # share of the steps that need more than the GPU has; None without a GPU
    fits: bool | None  # whether the longest possible micro-batch fits, also if no drawn order has it
    dropped: float  # share of the tokens that are cut off
    padding: float  # share of a micro-batch's tokens that only pad
    steps: int  # of an epoch
    exact: bool  # over all orders of the data, not a sample


class Lengths(NamedTuple):
    """The peaks of a run's steps, with the job's own batching and with others."""

    varying: Varying
    own: Peaks
    others: tuple[Peaks, ...]
    needs_flash: bool  # whether one of the others needs FlashAttention, which the job does not use


def step_peaks(answer: Estimate, varying: Varying) -> Lengths:
    """Return the steps' peaks with the job's own batching, with a shorter cut, padded, joined, packed and under a budget.

    Ways that the job's engine or model does not support are left out. Raises SpecError if the job's own batching is not modelled.
    """
    own = _priced(answer, varying, "", varying.batching)
    others = tuple(_others(answer, varying, own))
    needs_flash = answer.job.recipe.attention != "flash" and any(one.batching.way != "padded" for one in others)
    return Lengths(varying, own, others, needs_flash)


def _others(answer: Estimate, varying: Varying, own: Peaks) -> Iterator[Peaks]:
    batching = varying.batching
    cut = _cap(answer, varying, own)
    budget = round_up(min(batching.cut, max(varying.tokens)), _STEP_OF_A_BUDGET)
    for flags, other, makes_sense in (
        (f"--seq-len {cut}", batching._replace(cut=cut), cut > 0),
        ("padded", batching._replace(way="padded"), batching.way != "padded"),
        ("--padding-free", batching._replace(way="padding-free"), batching.micro_batch > 1),
        ("--packing --micro-batch 1", batching._replace(way="packed", micro_batch=1), True),
        (f"--token-budget {budget}", batching._replace(way="budget", budget=budget), batching.of_a_rank > 1),
    ):
        if makes_sense and (other.way != batching.way or other.cut != batching.cut):
            try:
                yield _priced(answer, varying, flags, other)
            except SpecError:  # not modelled, or no program batches like this
                continue


def _cap(answer: Estimate, varying: Varying, own: Peaks) -> int:
    """Return the length at which to cut: the largest with which every step fits, or the 99th percentile; 0 for none. [tokens]"""
    cut = min(varying.batching.cut, max(varying.tokens))
    long = round_up(varying.within(_WHOLE), _STEP_OF_A_CAP)
    if own.runs_out and varying.batching.way == "padded" and cut > _STEP_OF_A_CAP:
        tried = np.arange(_STEP_OF_A_CAP, cut, _STEP_OF_A_CAP)
        fits = _needed(answer.job, varying.batching.micro_batch, tried) <= (answer.capacity_bytes or 0)
        long = int(tried[fits][-1]) if fits.any() else 0
    return long if long < (cut if own.runs_out else _WORTH_IT * cut) else 0


def _priced(answer: Estimate, varying: Varying, flags: str, batching: Batching) -> Peaks:
    cut = np.minimum(varying.lengths, batching.cut)
    items, tokens, share, exact = _steps_of(cut, batching)
    job = _job_of(answer.job, varying._replace(batching=batching), int(tokens[-1]))
    need, up_to, capacity = _needed(job, job.batch.micro_batch_size, tokens), np.cumsum(share), answer.capacity_bytes
    allocated = need - int(answer.outside_band.expected_bytes)
    median, of_90, of_99 = (int(allocated[np.searchsorted(up_to, quantile - _SLACK)]) for quantile in (0.5, 0.9, 0.99))
    runs_out, fits = (None, None) if capacity is None else (float(share[need > capacity].sum()), int(need[-1]) <= capacity)
    dropped, steps = 1 - float(cut.sum() / varying.lengths.sum()), ceil_div(items, batching.per_step)
    return Peaks(
        flags, batching, median, of_90, of_99, int(allocated[-1]), int(tokens[-1]), runs_out, fits, dropped,
        _padding(cut, batching), steps, exact,
    )  # fmt: skip


def _job_of(job: JobSpec, varying: Varying, tokens: int) -> JobSpec:
    """Return the job with its longest micro-batch; raises SpecError if that is invalid. Joined sequences need FlashAttention."""
    batching, padded = varying.batching, varying.batching.way == "padded"
    batch = replace(
        job.batch, micro_batch_size=batching.micro_batch if padded else 1, seq_len=tokens, longest_seq_len=None,
        grad_accum_steps=largest(varying)[1] if batching.way == "budget" else batching.accumulated,
    )  # fmt: skip
    recipe = job.recipe if padded else replace(job.recipe, attention="flash", padded=False)
    return replace(job, recipe=recipe, batch=batch)


def _needed(job: JobSpec, sequences: int, tokens: Column) -> Column:
    """Return the most memory that a GPU needs for micro-batches of up to this many tokens. [bytes]

    "Up to", since with some models a slightly longer sequence needs less (Phi-3 at the end of its window). More than 1,024
    distinct lengths are rounded up to 1,024.
    """
    tried = np.unique(np.minimum(round_up(tokens, ceil_div(int(tokens[-1]), _MOST_SHAPES)), tokens[-1]))
    found = needed(job, Columns(sequences, tried, job.batch.grad_accum_steps)).least_bytes
    return np.maximum.accumulate(np.broadcast_to(found, tried.shape))[np.searchsorted(tried, tokens)]


# --- how many steps have how long a micro-batch -------------------------------------------------------------------------------


class _Steps(NamedTuple):
    """The distribution of the longest micro-batch over the steps of an epoch."""

    items: int  # sequences or packs of an epoch
    tokens: Column  # distinct values, ascending
    share: Shares  # of the steps with each
    exact: bool


def _steps_of(cut: Column, batching: Batching) -> _Steps:
    if batching.way == "packed":
        some = cut if len(cut) <= PACKED_AT_ONCE else next(_orders(cut, MOST_PLACED))[:MOST_PLACED]
        packs = np.array(packed(some.tolist(), batching.cut), dtype=np.int64)
        found = _steps_of(packs, batching._replace(way="padding-free"))
        return found._replace(items=ceil_div(len(packs) * len(cut), len(some)), exact=found.exact and some is cut)
    if batching.way == "padded" or (batching.way == "padding-free" and batching.micro_batch == 1):
        return _Steps(len(cut), *of_the_longest(-(-cut // batching.multiple) * batching.multiple, batching.per_step), True)
    per_order, most = (_under_budget, _BUDGETED) if batching.way == "budget" else (_joined, _DRAWN)
    drawn = np.concatenate([per_order(order[:most], batching) for order in _orders(cut, most)])
    tokens, counts = np.unique(round_up(drawn, batching.multiple), return_counts=True)
    highest = round_up(_longest(cut, batching), batching.multiple)
    if not _are_few(cut) and highest > tokens[-1]:  # no drawn order contains the longest possible one
        tokens, counts = np.append(tokens, highest), np.append(counts, 0)
    return _Steps(len(cut), tokens, counts / counts.sum(), _are_few(cut))


def _longest(cut: Column, batching: Batching) -> int:
    """Return the tokens of the longest possible micro-batch: the longest sequences together, at most the budget."""
    at_once = batching.of_a_rank if batching.way == "budget" else batching.micro_batch
    together = int(np.sort(cut)[-at_once:].sum())
    return min(batching.budget, together) if batching.way == "budget" else together


def of_the_longest(values: Column, per_step: int) -> tuple[Column, Shares]:
    """Return the distinct values, and the share of steps in which each is the highest. An epoch's last step may be smaller."""
    tokens, counts = np.unique(values, return_counts=True)
    full, rest = divmod(len(values), per_step)
    up_to = full * _none_above(counts, per_step) + (_none_above(counts, rest) if rest else 0)
    return tokens, np.diff(up_to, prepend=0) / (full + (rest > 0))


def _none_above(counts: Column, drawn: int) -> Shares:
    """For each distinct value v: the chance that all drawn values are at most v, C(values up to v, drawn) / C(all, drawn)."""
    up_to, drawn = np.cumsum(counts), min(drawn, int(counts.sum()))
    log = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, up_to[-1] + 1)))))
    chance = np.exp(log[up_to] - log[np.maximum(up_to - drawn, 0)] - log[up_to[-1]] + log[up_to[-1] - drawn])
    return np.where(up_to >= drawn, chance, 0.0)


def _are_few(values: Column) -> bool:
    """Whether there are few enough values to try every order."""
    return math.factorial(min(len(values), 9)) <= _ORDERS


def _orders(values: Column, most: int) -> Iterator[Column]:
    """Yield all orders of few values, else random orders with at most ``most`` values together."""
    if _are_few(values):
        yield from (np.array(order) for order in permutations(values.tolist()))
        return
    draw = np.random.default_rng(0)
    yield from (draw.permutation(values) for _ in range(max(1, min(_ORDERS, most // len(values)))))


def _joined(order: Column, batching: Batching) -> Column:
    """Return the tokens of the longest micro-batch of each step, with sequences joined in this order."""
    sums = np.add.reduceat(order, np.arange(0, len(order), batching.micro_batch))
    return np.maximum.reduceat(sums, np.arange(0, len(sums), batching.ranks * batching.accumulated))


def _under_budget(order: Column, batching: Batching) -> Iterable[int]:
    each, steps = batching.of_a_rank, (order[at : at + batching.per_step] for at in range(0, len(order), batching.per_step))
    ranks = ([step[of : of + each].tolist() for of in range(0, len(step), each)] for step in steps)
    return [max(budgeted(each_rank, batching.budget)) for each_rank in ranks]


def _padding(cut: Column, batching: Batching) -> float:
    """Return the expected share of padding in padded micro-batches."""
    if batching.way != "padded" or batching.micro_batch == 1:
        return 0.0
    tokens, counts = np.unique(cut, return_counts=True)
    full, rest = divmod(len(cut), batching.micro_batch)
    parts = ((full, batching.micro_batch), (1, rest))
    made = sum(many * size * float(tokens @ np.diff(_none_above(counts, size), prepend=0)) for many, size in parts if size)
    return max(0.0, 1 - float(cut.sum()) / made)
