"""dion's Muon against its own code (0a059a4), which ran once without the compiler on one rank of a fake process group."""

from __future__ import annotations

import pytest

from tests.engines.columns import Columns, assert_is_its_points
from tests.formulas import assert_explained
from zeroplan import SpecError, estimate, job
from zeroplan.engines import dion
from zeroplan.engines.fsdp2 import account
from zeroplan.engines.optimizers import LocalTensor
from zeroplan.ledger import Phase
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.mesh import MeshSpec

_SHAPES = ((64, 64), (32, 64), (32, 64), (64, 64), (176, 64), (176, 64), (64, 176))


@pytest.mark.parametrize(
    ("ranks", "width", "layers", "ran", "beyond"),
    [  # bytes that the step allocated at its peak; with fewer matrices of a shape than ranks the estimate is a bound
        (4, 4, 4, 509_952, 0),
        (4, 2, 4, 434_176, 0),
        (2, 4, 3, 798_720, 0),
        (3, 2, 2, 455_360, 0),
        (8, 4, 2, 286_720, 0.08),
        (1, 4, 3, 983_040, 0),
        (1, 2, 2, 548_864, 0),
    ],
)
def test_a_step_that_ran_once(ranks: int, width: int, layers: int, ran: int, beyond: float) -> None:
    tensors = tuple(LocalTensor((-(-rows // ranks), columns), layers, ranks=ranks, rows=rows) for rows, columns in _SHAPES)
    assert ran <= int(dion.highest(tensors, width)) <= ran * (1 + beyond)


def test_answers_explain_themselves_and_columns_are_their_points() -> None:
    asked = job(model="smollm2-135m", gpus=2, stage=3, engine="fsdp2", optimizer="dion-muon", seq_len=64)
    answer = estimate(asked)
    assert_explained(answer)
    sent = [one for one in answer.traffic.collectives if one.phase is Phase.STEP]
    assert {(one.operation, one.calls) for one in sent} == {("all_to_all", 2)}
    points = [(MeshSpec(dp_shard=ranks), BatchSpec(seq_len=64)) for ranks in (1, 2, 3, 8)]
    columns = Columns(points)
    whole = account(asked.model, asked.recipe, columns, columns)  # type: ignore[arg-type]
    assert_is_its_points(whole, [account(asked.model, asked.recipe, *point) for point in points])


@pytest.mark.parametrize(
    ("changed", "said"), [({"tensor_parallel": 2}, "ranks that split the model"), ({"model": "mixtral-8x7b"}, "experts")]
)
def test_what_is_not_modelled_is_refused(changed: dict[str, object], said: str) -> None:
    asked = {"model": "smollm2-135m", "gpus": 4, "stage": 3, "engine": "fsdp2", "optimizer": "dion-muon", "seq_len": 64}
    with pytest.raises(SpecError, match=f"optimizer 'dion-muon' with {said}.*; use "):
        job(**{**asked, **changed})  # type: ignore[arg-type]
