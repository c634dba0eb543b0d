"""Loading an engine loads no other engine, since start-up is a part of the time to an answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zeroplan.spec.job import ENGINE_STAGES

#: FSDP1's estimate is built on FSDP2's, with other units and another path of gradients.
_BUILT_ON = {"fsdp1": {"fsdp2"}}


@pytest.mark.parametrize("engine", list(ENGINE_STAGES))
def test_an_engine_loads_no_other_engine(engine: str) -> None:
    script = f"import sys, zeroplan.engines.{engine}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    engines = {name.split(".")[2] for name in loaded if name.startswith("zeroplan.engines.")}
    assert engines & set(ENGINE_STAGES) == {engine} | _BUILT_ON.get(engine, set())
