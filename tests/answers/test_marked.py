"""No code reads the texts for people: a mark before every reason and name changes no number, order or verdict.

The test compares the memory and time of snapshot jobs, comparisons with records, random jobs (alone and in columns), and plans.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.combined import every_case

HERE = Path(__file__).parents[2]
#: How many snapshot jobs, records and random jobs are asked: by day a sample, at night all.
SAMPLE = ("--every", "1", "--random", "300") if every_case() else ("--every", "36", "--random", "8")


def _answers_of(flags: tuple[str, ...]) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.answers.marked", *SAMPLE, *flags]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_marks_before_all_texts_change_no_answer():
    with ThreadPoolExecutor() as both:
        plain, marked = both.map(_answers_of, ((), ("--mark",)))
    moved = [name for name in plain if plain[name] != marked[name]]
    assert plain.keys() == marked.keys()
    assert not moved, f"{len(moved)} of {len(plain)} answers move: {moved[:5]}"


def test_every_text_of_an_answer_has_a_mark():
    done = subprocess.run([sys.executable, "-c", _ASK], cwd=HERE, capture_output=True, text=True, check=True)
    texts = json.loads(done.stdout)
    assert len(texts) > 100
    assert all(text.startswith("‹") for text in texts)


_ASK = """
import json
from tests.answers.marked import mark_everything
mark_everything()
from zeroplan import estimate, job
answer = estimate(job(model="llama-3.2-1b", gpus=4, gpu="h100"))
calls = answer.traffic.collectives
print(json.dumps([moment.name for moment in answer.moments] + [line.reason for moment in answer.moments for line in moment.lines]
                 + [call.what for call in calls] + [call.when for call in calls]))
"""
