"""Compares blocks whose linear attention kernels of other packages run with runs of these packages' own code, to the byte.

The runs are saved (``measured_linear_kernels.py``), since the packages need a GPU's compiler to be installed as usual.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft is not installed, and builds the adapters that are measured here")

from tests.simulated import in_a_process_of_its_own
from tests.transformer.drawn_blocks import differences_from
from tests.transformer.linear_kernels import installed
from tests.transformer.measured_linear_kernels import CASES_OF_MAMBA, FAMILIES, cases, measured, saved

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_takes_what_is_said(family: str) -> None:
    runs = saved()
    found = {name: differences_from(runs[name], case) for name, case in cases() if name.startswith(f"{family},")}
    assert len(found) >= CASES_OF_MAMBA
    assert {name: beyond for name, beyond in found.items() if beyond} == {}


@pytest.mark.skipif(not installed(), reason="fla, causal_conv1d and mamba_ssm are not installed, whose code the saved runs ran")
def test_the_saved_runs_are_those_of_the_packages() -> None:
    name, case = next(cases())
    assert in_a_process_of_its_own(measured, case) == saved()[name]
