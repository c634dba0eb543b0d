"""Counts the checks and jobs of a night. Processes can add up their counts, whose size does not grow with the number of cases."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroplan import JobSpec
    from zeroplan.spec.base import Spec

#: How many different reasons a section counts; it counts further ones together.
MOST_REASONS = 300
_OTHERS = "others"
_NUMBER = re.compile(r"(?<![\w.-])-?[0-9][0-9,.]*(e\+?[0-9]+)?")


class Tally:
    """Counts by section: checks that held, checks that did not apply with the reason, failed draws with the reason, and choices."""

    def __init__(self) -> None:
        self.sections: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def count(self, section: str, what: str, times: int = 1) -> None:
        """Add to a count; beyond ``MOST_REASONS`` names of a section, add to "others"."""
        counts = self.sections[section]
        counts[what if what in counts or len(counts) < MOST_REASONS else _OTHERS] += times

    def reason(self, section: str, text: str) -> None:
        """Count a reason with its numbers replaced by N, so that it is the same for every job."""
        self.count(section, _NUMBER.sub("N", text)[:150])

    def add(self, other: Tally) -> None:
        """Add the counts of another process."""
        for section, counts in other.sections.items():
            for what, times in counts.items():
                self.count(section, what, times)

    def lines(self) -> Iterator[str]:
        """Yield all counts as lines; in each section the most frequent come first."""
        for section, counts in sorted(self.sections.items()):
            yield f"\n{section} ({sum(counts.values()):,})"
            for what, times in sorted(counts.items(), key=lambda one: (-one[1], one[0])):
                yield f"{times:>12,}  {what}"


def kinds(job: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the choices of a job: the section and the choice."""
    recipe, model, mesh = job.recipe, job.model, job.mesh
    ways = [way for way in ("tp", "cp", "pp", "ep", "dp_replicate") if getattr(mesh, way) > 1]
    yield "drawn: engine and stage", f"{recipe.engine} {recipe.zero_stage}"
    yield "drawn: family", model.family
    yield "drawn: ranks", f"{recipe.engine} {' '.join(ways) or 'data alone'}"
    yield "drawn: trained", _trained(job)
    yield "drawn: GPU", "none" if job.cluster.gpu is None else "with measured shares" if job.cluster.shares else "named"
    for what, value in _choices(recipe, recipe.engine):
        yield "drawn: option", f"{what} = {value}"
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window", "unplaced_parameters"):
        if getattr(model, name):
            yield "drawn: model", name
    yield "drawn: model", f"of {_magnitude(model.hidden_size * model.num_hidden_layers)} wide and deep"
    yield "drawn: tokens", _magnitude(job.batch.micro_batch_size * job.batch.seq_len)
    yield "drawn: ranks that shard", _magnitude(mesh.dp_shard)


def _trained(job: JobSpec) -> str:
    model = job.model
    if model.adapter is not None:
        return "LoRA" if model.adapter.quantize == "none" else f"QLoRA {model.adapter.quantize}"
    return "partly frozen" if model.frozen is not None else "a profile" if model.profile is not None else "everything"


def _choices(spec: Spec, engine: str, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield a spec's fields with their strings and booleans; numbers only as "a number"; options only of the job's engine."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        if hasattr(value, "check_rules"):
            yield from _choices(value, engine, f"{field.name}.") if field.name == engine else ()
        elif isinstance(value, (str, bool)) or value is None:
            yield path + field.name, value
        else:
            yield path + field.name, "a number"


def _magnitude(number: int) -> str:
    return f"10^{len(str(number)) - 1}"
