"""Every figure of the ZeRO paper that the engine `paper` covers, to the printed digits."""

import tomllib
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from zeroplan import Estimate, estimate, job
from zeroplan.units import GB

GOLDEN = tomllib.loads((Path(__file__).parent / "zero.toml").read_text(encoding="utf-8"))
FIGURE_1, TABLE_1, TABLE_2 = GOLDEN["figure_1"], GOLDEN["table_1"], GOLDEN["table_2"]
TABLE_1_CELLS = [
    pytest.param(model["parameters"], gpus, stage, printed, model["rounds"], id=f"{model['parameters']:.3g}-{gpus}-{stage}")
    for model in TABLE_1["model"]
    for gpus, *columns in model["rows"]
    for stage, printed in zip((1, 2, 3), columns, strict=True)
]


def states_gb(parameters: float, gpus: int, stage: int) -> Decimal:
    return Decimal(states(parameters, gpus, stage)) / GB


def states(parameters: float, gpus: int, stage: int) -> int:
    return sum(answer(parameters, gpus, stage).states_by_kind.values())


def answer(parameters: float, gpus: int, stage: int) -> Estimate:
    return estimate(job(params=parameters, gpus=gpus, stage=stage, engine="paper"))


def as_printed(value: Decimal, printed: str, *, rounds: bool = True) -> str:
    """Round to the printed decimals, or truncate where the paper does."""
    return str(value.quantize(Decimal(printed), rounding=ROUND_HALF_UP if rounds else ROUND_DOWN))


@pytest.mark.parametrize(("stage", "printed"), list(enumerate(FIGURE_1["printed_gb"])))
def test_figure_1(stage: int, printed: str):
    assert as_printed(states_gb(FIGURE_1["parameters"], FIGURE_1["gpus"], stage), printed) == printed


def test_table_1_is_complete():
    assert len(TABLE_1_CELLS) == 54


@pytest.mark.parametrize(("parameters", "gpus", "stage", "printed", "rounds"), TABLE_1_CELLS)
def test_table_1(parameters: float, gpus: int, stage: int, printed: str, rounds: bool):
    assert as_printed(states_gb(parameters, gpus, stage), printed, rounds=rounds) == printed


@pytest.mark.parametrize("row", TABLE_2["rows"], ids=lambda row: f"mp{row[0]}")
def test_table_2(row: list[object]):
    """The estimated bytes per parameter of each stage, at 64B parameters, give the largest model that fits."""
    degree, *columns = row
    for stage, printed in enumerate(map(str, columns)):
        single = as_printed(largest_model(stage), str(TABLE_2["rows"][0][1 + stage]))
        number, in_trillions = printed.removesuffix("T"), printed.endswith("T")
        largest = Decimal(str(degree)) * Decimal(single)
        assert as_printed(largest / 1000 if in_trillions else largest, number) == number, (stage, printed)


def largest_model(stage: int) -> Decimal:
    """Return the largest model in 10^9 parameters, on the paper's GPU with one tensor-parallel rank."""
    probe = 64 * 10**9
    return Decimal(TABLE_2["memory_gb"]) * probe / states(probe, TABLE_2["gpus_per_replica"], stage)


@pytest.mark.parametrize("degree", [2, 4, 8, 16])
def test_tensor_parallelism_divides_every_state(degree: int):
    split = estimate(job(params=64e9, gpus=64 * degree, stage=1, engine="paper", tensor_parallel=degree))
    assert sum(split.states_by_kind.values()) * degree == states(64e9, 64, 1)


def test_seven_billion_parameters_under_plain_adam():
    case = GOLDEN["plain_adam"]
    one, eight = states_gb(case["parameters"], 1, 0), states_gb(case["parameters"], case["gpus"], 3)
    assert as_printed(one, case["replicated_gb"]) == case["replicated_gb"]
    assert as_printed(eight, case["sharded_gb"]) == case["sharded_gb"]


@pytest.mark.parametrize(("stage", "volume"), list(enumerate(GOLDEN["communication"]["volume"])))
def test_communication_volume(stage: int, volume: int):
    result = answer(8e9, 64, stage)
    assert result.traffic.volume_elements == volume * result.parameters
    assert result.traffic.relative_to_ddp == volume / 2
    assert result.traffic.total_bytes == volume * 2 * result.parameters * 63 // 64
