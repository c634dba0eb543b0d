"""The figures of several hundred jobs are those of the snapshot, so that no answer changes unnoticed.

If a change is meant to change answers, ``python -m tests.answers.snapshot`` prints which, and saves the new ones.
"""

from __future__ import annotations

from itertools import islice

from tests.answers import snapshot


def test_no_answer_has_changed():
    beyond = list(islice(snapshot.differences(snapshot.stored(), snapshot.answers()), 20))
    assert not beyond, "\n".join(beyond)
