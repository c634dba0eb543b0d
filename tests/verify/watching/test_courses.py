"""In every block of a run on real tensors, the bytes of torch's profiler and of the tracker agree within 0.5 %."""

from __future__ import annotations

import pytest

from tests.verify.watching.test_tracker import DDP, FSDP2
from zeroplan.ledger import Kind
from zeroplan.measurement import CourseMeasured, StepMeasured

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


def courses(step: StepMeasured) -> dict[str, CourseMeasured]:
    return {phase.phase: phase.course for phase in step.phases if phase.course is not None}


@pytest.mark.parametrize("name", ["llama, sgd", "gpt2, recomputed", "mixtral", "ddp, accumulation", "zero-1"])
def test_the_profiler_and_the_tracker_see_the_same_in_every_block(name: str):
    from tests.verify.watching.unwatched import watched
    from zeroplan.verify.training.run import run
    from zeroplan.verify.watching.log import Log
    from zeroplan.verify.watching.profiled import Ledger, Profiled
    from zeroplan.verify.watching.timeline import Timeline, steps_measured

    asked, steps = (FSDP2 | DDP)[name], 3 if name in DDP else 2
    tracked = steps_measured(Timeline(watched(asked, fake=False, steps=steps).recording))
    profiled = Profiled(Log(), lambda _: None)
    run(asked, profiled, steps=steps, fake=False)
    seen = Ledger(profiled, sizes={}, standing=Kind.TEMPORARY).steps()
    found, expected = courses(seen[-1]), courses(tracked[-1])
    assert list(found) == list(expected) == ["forward", "backward"]
    for phase, course in found.items():
        assert len(course.blocks) == asked.model.num_hidden_layers
        places = (course.before_bytes, *course.blocks, course.after_bytes)
        like = expected[phase]
        assert places == pytest.approx(
            (like.before_bytes, *like.blocks, like.after_bytes), rel=0.005
        )  # scratch inside CPU kernels
    assert all(courses(step) == {} for step in (*seen[:-1], *tracked[:-1]))


def test_hooks_are_removed_after_watching():
    from torch.nn.modules import module

    from zeroplan.verify.watching.places import Places

    before = len(module._global_forward_pre_hooks), len(module._global_forward_hooks)
    places = Places(lambda _: None)
    with places:
        assert len(module._global_forward_pre_hooks) == before[0] + 1
    assert (len(module._global_forward_pre_hooks), len(module._global_forward_hooks)) == before
