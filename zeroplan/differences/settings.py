"""A job's settings as texts by flag, so that two jobs can be compared."""

from collections.abc import Iterator
from dataclasses import fields

from zeroplan.resolve import request_of
from zeroplan.spec.base import Spec
from zeroplan.spec.hardware import GpuSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import ModelSpec

NOT_SET = "not set"
_WORDS = {True: "yes", False: "no"}


def settings_of(job: JobSpec) -> dict[str, str]:
    """Return every setting of a job by the name of its flag; options of an engine and of the model have a dot.

    >>> from zeroplan import job
    >>> settings = settings_of(job(model="gpt2", gpus=8, stage=3))
    >>> settings["model"], settings["stage"], settings["model.hidden_size"], settings["recompute_layers"]
    ('gpt2', '3', '768', 'not set')
    """
    request = request_of(job)
    return {name: text for field in fields(request) for name, text in _texts(field.name, getattr(request, field.name))}


def _texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, ModelSpec):
        yield name, value.name or value.family
    if isinstance(value, GpuSpec):
        yield name, value.name
        yield f"{name}.memory_bytes", text_of(int(value.memory_bytes.value))
    elif isinstance(value, Spec):
        for field in fields(value):
            if field.name not in (
                "name",
                "profile",
            ):  # a profile has thousands of numbers; the model's name identifies it
                yield from _texts(f"{name}.{field.name}", getattr(value, field.name))
    else:
        yield name, text_of(value)


def text_of(value: object) -> str:
    """Return a value as text for people.

    >>> text_of(True), text_of(None), text_of(500_000_000), text_of(3.5)
    ('yes', 'not set', '500,000,000', '3.5')
    """
    if value is None or value == "":
        return NOT_SET
    if isinstance(value, bool):
        return _WORDS[value]
    return f"{value:,}" if isinstance(value, int) else str(value)
