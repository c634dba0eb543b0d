"""Two tables say what an engine's functions allocate memory for: one for snapshots, one for runs. They must agree."""

import ast
from pathlib import Path

import pytest

import zeroplan
from zeroplan.snapshots.kinds import _FUNCTIONS

TRAINING = Path(zeroplan.__file__).parent / "verify" / "training"


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_a_run_and_a_snapshot_name_functions_alike(engine: str):
    table = next(
        node.value
        for node in ast.parse((TRAINING / f"{engine}.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target).lstrip("_") == "REQUESTING"
    )
    said = [(ast.literal_eval(name), ast.unparse(kind)) for _, name, kind in (row.elts for row in table.elts)]
    assert said
    for name, kind in said:
        assert f"Kind.{_FUNCTIONS[name.removeprefix('_DeepSpeedZeroOptimizer_Stage3')][1].name}" == kind, name
