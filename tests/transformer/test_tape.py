"""Checks the tape on examples that are small enough to follow by hand."""

from __future__ import annotations

import pytest

from zeroplan import estimate, job
from zeroplan.expr import Size
from zeroplan.ledger import Kind
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families import ring
from zeroplan.transformer.families.highest import highest
from zeroplan.transformer.families.tape import Alive, Mode, Site, Store, Tape, Value
from zeroplan.transformer.families.traced import plan_of
from zeroplan.transformer.symbols import T, e, f, h, k, q, r

HERE = Site("product", "here")


def sizes(moment: Alive) -> list[Size]:
    return sorted((store.size for store in moment.stores), key=str)


def store(size: Size) -> Store:
    return Store(Kind.ACTIVATIONS, size.text, size, "here")


def a_linear_map(*, autocast: bool = False) -> tuple[Tape, Value, Value]:
    tape = Tape(wide=False, autocast=autocast, saving=True)
    given = Value(tape.make(Kind.ACTIVATIONS, "input", r * T * h, "here"), r, T * h)
    made = op.linear(tape, given, f, HERE)
    return tape, given, made


def test_a_linear_map_saves_its_input_and_makes_two_gradients() -> None:
    tape, given, made = a_linear_map()
    assert [one.size for one in tape.saved] == [r * T * h]
    tape.release(given, made)
    tape.run_backward(made, store(e * T * f))
    (moment,) = highest(tape.moments, wide=False, autocast=False)
    assert sizes(moment) == [e * T * f, r * T * h, r * T * h]
    assert moment.gradients == moment.current == (h * f,)


def test_under_autocast_it_saves_a_cast_and_casts_the_weight_gradient_last() -> None:
    tape, given, made = a_linear_map(autocast=True)
    assert [one.size for one in tape.saved] == [e * T * h]
    assert tape.casts == [h * f]
    tape.release(given, made)
    tape.run_backward(made, store(e * T * f))
    assert [moment.name for moment in tape.moments][-1] == "product: cast of the weight gradient"
    assert tape.moments[-1].current == (h * f,)
    assert not tape.casts


def test_an_operator_keeps_its_own_tensors_and_frees_what_is_beside_its_output() -> None:
    tape = Tape(wide=False, autocast=False, saving=True)
    given = Value(tape.make(Kind.ACTIVATIONS, "input", e * T * h, "here"), e, T * h)
    made = op.run(
        tape,
        given,
        "output",
        "here",
        shape=T * f,
        passing=(("beside", T * k),),
        keeps=(("statistics", 4 * T),),
        gradient="of it",
    )
    assert [one.size for one in tape.saved] == [4 * T]
    assert sizes(tape.moments[-1]) == sorted((e * T * h, e * T * f, T * k, 4 * T), key=str)
    assert [one.size for one in tape.alive] == [e * T * h, e * T * f, 4 * T]
    tape.release(given, made)
    tape.run_backward(made, store(e * T * f))
    assert [one.reason for one in tape.alive] == ["of it"]


@pytest.mark.parametrize("weights_frozen", [False, True])
def test_an_operators_own_weight_gets_a_gradient_unless_it_is_frozen(weights_frozen: bool) -> None:
    tape = Tape(wide=False, autocast=False, saving=True)
    tape.mode = Mode(weights_frozen=weights_frozen)
    given = Value(tape.make(Kind.ACTIVATIONS, "input", e * T * h, "here"), e, T * h)
    made = op.plus_bias(tape, given, h, "sum", HERE)
    tape.release(given, made)
    tape.run_backward(made, store(e * T * h))
    assert tape.gradients.made == ([] if weights_frozen else [h])
    assert [one.reason for one in tape.alive] == [(e * T * h).text]  # the output's gradient is the input's


def test_a_second_gradient_is_added_in_place() -> None:
    """``x + relu(x)``: the direct gradient waits in x's buffer, and autograd adds relu's gradient to it in place."""
    tape = Tape(wide=False, autocast=False, saving=True)
    given = Value(tape.make(Kind.ACTIVATIONS, "input", e * T * h, "here"), e, T * h)
    active = op.pointwise(tape, given, "relu", Site("relu", "here"), saves_result=True)
    made = op.add(tape, given, active, "sum", Site("addition", "here"))
    tape.release(given, active, made)
    tape.run_backward(made, store(e * T * h))
    assert max(len(moment.stores) for moment in tape.moments) == 3  # relu's result, the gradient, and that through relu
    assert len(tape.alive) == 1


def test_moments_below_another_are_left_out() -> None:
    def moment(name: str, *alive: Size, gradients: tuple[Size, ...] = ()) -> Alive:
        return Alive(name, tuple(map(store, alive)), gradients, (), ())

    moments = [
        moment("small", e * T * h),
        moment("wide", 4 * T * h),
        moment("keys", 2 * T * h, e * T * k),
        moment("queries", 2 * T * h, e * T * q),
        moment("late", e * T * h, gradients=(h * f,)),
    ]
    kept = highest(moments, wide=False, autocast=False)
    assert [one.name for one in kept] == ["wide", "queries", "late"]


def test_of_equal_moments_one_stays() -> None:
    alive = [Alive(name, (store(e * T * h),), (), (), ()) for name in ("first", "second")]
    assert len(highest(alive, wide=True, autocast=False)) == 1


def test_what_two_operators_saved_stays_until_the_second_has_read_it() -> None:
    """After a recomputation no variable holds the tensor, so its last reader frees it."""
    tape = Tape(wide=False, autocast=False, saving=True, recomputed=True)
    shared = tape.make(Kind.ACTIVATIONS, "read twice", e * T * h, "here")
    tape.hold(shared)  # one for each operator
    tape.used(shared)
    assert shared in tape.alive
    tape.drop(shared)
    tape.used(shared)
    assert shared not in tape.alive


def test_what_leads_to_no_loss_has_no_backward() -> None:
    """Autograd ignores a branch whose output nobody uses, so its weight gets no gradient."""
    tape, given, made = a_linear_map()
    unused = op.linear(tape, given, q, Site("branch that nobody uses", "here"))
    tape.release(given, made, unused)
    tape.run_backward(made, store(e * T * f))
    assert tape.gradients.made == [h * f]


def test_where_nothing_is_saved_nothing_is_run_again() -> None:
    """A frozen layer whose input autograd does not track."""
    tape = Tape(wide=False, autocast=False, saving=False)
    given = Value(tape.make(Kind.ACTIVATIONS, "input", e * T * h, "here"), e, T * h)
    op.linear(tape, given, f, HERE)
    assert [one.stores for one in tape.moments_until_last_saved()] == [()]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_rings_repeated_steps_are_no_maxima(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan leaves them out. It has the same moments with all of them."""
    asked = job(model="llama-3.1-8b", gpus=8, context_parallel=8, seq_len=16384, recompute=recompute)
    plan_of.cache_clear()
    without = estimate(asked)
    monkeypatch.setattr(ring, "_others", lambda _tape, ranks: range(1, ranks))
    plan_of.cache_clear()
    assert estimate(asked).moments == without.moments
    assert plan_of.cache_info().misses
    plan_of.cache_clear()
