"""An engine is loaded alone: start-up is part of the time to an answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zeroplan.spec.job import ENGINE_STAGES

#: FSDP1's step is FSDP2's, with other units and another way of a gradient.
_BUILT_ON = {"fsdp1": {"fsdp2"}}


@pytest.mark.parametrize("engine", list(ENGINE_STAGES))
def test_an_engine_brings_no_other(engine: str) -> None:
    script = f"import sys, zeroplan.engines.{engine}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    engines = {name.split(".")[2] for name in loaded if name.startswith("zeroplan.engines.")}
    assert engines & set(ENGINE_STAGES) == {engine} | _BUILT_ON.get(engine, set())
