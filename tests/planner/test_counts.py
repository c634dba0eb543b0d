"""How much work does a plan do? Counts, unlike times, are the same on every machine."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from zeroplan import Request
from zeroplan.engines.deepspeed import notes
from zeroplan.planner import search
from zeroplan.planner.asking import Question, ask
from zeroplan.replay import _Playing
from zeroplan.spec.job import JobSpec


class Work(NamedTuple):
    """What a plan does."""

    jobs: int
    """Descriptions of whole jobs that are made and checked."""
    structures: int
    """Structures whose layouts are computed."""
    walks: int
    """Passes of ZeRO-3's coordinator over all modules of a model."""
    replays: int
    events: int
    """Requests and releases in all replays, in thousands."""


#: At most this much, on 64 H100. DeepSeek-V3 fits only tightly, so its layouts are replayed one after the other.
_MOST = {
    "llama-3.1-8b": Work(jobs=222, structures=121, walks=22, replays=0, events=0),
    "mixtral-8x7b": Work(jobs=565, structures=397, walks=22, replays=0, events=0),
    "llama-4-maverick": Work(jobs=100, structures=64, walks=64, replays=0, events=0),
    "deepseek-v3": Work(jobs=1095, structures=802, walks=64, replays=2, events=391),
}


@pytest.mark.parametrize("model", _MOST)
def test_a_plan_does_no_work_twice(model: str, monkeypatch: pytest.MonkeyPatch):
    done = dict.fromkeys(Work._fields, 0)

    def counting(owner: object, method: str, name: str) -> None:
        plain = getattr(owner, method)

        def counted(*args: object, **options: object) -> object:
            done[name] += 1
            return plain(*args, **options)

        monkeypatch.setattr(owner, method, counted)

    def played(self: _Playing, start: int, stop: int) -> tuple[int, int | None]:
        done["events"] += stop - start
        return run(self, start, stop)

    run = _Playing._run
    monkeypatch.setattr(_Playing, "_run", played)
    counting(JobSpec, "check_rules", "jobs")
    counting(search, "evaluated", "structures")
    counting(_Playing, "__init__", "replays")
    counting(notes._Replay, "__init__", "walks")
    ask(Request(model=model, gpu="h100-sxm-80gb", gpus=64, seq_len=4096), Question())
    found = Work(**done)._replace(events=done["events"] // 1000)
    assert all(count <= most for count, most in zip(found, _MOST[model], strict=True)), found
