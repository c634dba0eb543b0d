"""No answer moves unseen: the figures of six hundred jobs are what the snapshot says.

Where a change means to move some, ``python -m tests.answers.snapshot`` says which and writes them anew.
"""

from __future__ import annotations

from itertools import islice

from tests.answers import snapshot


def test_no_answer_has_moved():
    beyond = list(islice(snapshot.differences(snapshot.stored(), snapshot.answers()), 20))
    assert not beyond, "\n".join(beyond)
