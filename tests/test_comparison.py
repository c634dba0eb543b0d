"""An estimate held against a record that says something no estimate has."""

from dataclasses import replace

from tests.measured.stored import records
from zeroplan.comparison import compare_with_estimate
from zeroplan.measurement import PhaseMeasured


def test_a_phase_that_no_estimate_has_is_left_out_and_changes_nothing():
    """Evaluation between steps, of another program's record."""
    record = next(iter(records()))
    *before, last = record.steps
    phases = (*last.phases, PhaseMeasured(phase="evaluation", peak_bytes=1, kinds={}))
    longer = replace(record, steps=(*before, replace(last, phases=phases)))
    found = compare_with_estimate(longer)
    assert found == compare_with_estimate(record)
    assert {row.what for row in found.phases} == {phase.phase for phase in last.phases}
