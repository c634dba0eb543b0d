"""Answers the page's questions as plain data, with the command line's functions. Its only state is a cache of estimates."""

import json
import shlex
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import fields
from functools import cache, lru_cache
from typing import cast

from zeroplan.catalog.config import is_content
from zeroplan.errors import SpecError, ZeroplanError, unknown_name
from zeroplan.estimator import Estimate, replayed_if_tight
from zeroplan.estimator import estimate as estimate_anew
from zeroplan.explore.configurations import configurations
from zeroplan.explore.controls import Control, controls
from zeroplan.job_time import time_of
from zeroplan.memo import remembering
from zeroplan.remedies import longest_sequences, remedies
from zeroplan.report.out_of_memory import explained, message_text
from zeroplan.report.palette import ENGINES, LOOKS
from zeroplan.report.palette import STAGES as STAGE_LOOKS
from zeroplan.report.payload import estimate_payload
from zeroplan.report.series.scaling import scaling
from zeroplan.report.series.stages import STAGES, at_stage, stages
from zeroplan.report.series.step import step
from zeroplan.report.series.timeline import timeline
from zeroplan.report.words import NAME_A_GPU, headline, job_lines, verdict_sentence
from zeroplan.resolve import Request, Resolved, resolve
from zeroplan.resolve.options import KEEP_LOGITS, SWITCH
from zeroplan.settings import with_setting
from zeroplan.snapshots.message import read_message
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import Stage
from zeroplan.units import GIBIBYTES, parse_count, parse_tokens

SCHEMA_VERSION = 1

MESSAGE = "message"
"""The field of a question that has torch's out-of-memory message, beside the controls."""

#: The controls that the planner reads; its search decides the others.
DESCRIBE = ("model", "config", "lora_rank", "quantize", "gpu", "gpus", "precision", "optimizer", "attention", "seq_len")


@lru_cache(maxsize=32)
def estimate(job: JobSpec) -> Estimate:
    """Return the estimate of a job; cached, since the page asks several questions about a job."""
    return estimate_anew(job)


@cache
def _controls() -> dict[str, Control]:
    return {control.name: control for control in controls()}


def _label(name: str) -> str:
    return _controls()[name].label


def controls_payload() -> dict[str, object]:
    """Return the controls, and the colours of the drawings."""
    return {
        "schema_version": SCHEMA_VERSION,
        "controls": [plain(control) for control in _controls().values()],
        "describe": DESCRIBE,
        "colours": {what: look.colour for what, look in LOOKS.items()},
        "engines": {engine: look.colour for engine, look in ENGINES.items()},
        "hatches": {what: look.hatch for what, look in LOOKS.items()},
        "stages": {stage: look.colour for stage, look in STAGE_LOOKS.items()},
    }


def answer_payload(fields: Mapping[str, str]) -> dict[str, object]:
    """Return the whole answer for the controls' job: the estimate of ``--json``, and the data of the charts.

    Raises :class:`~zeroplan.errors.ZeroplanError`, one line, for an invalid job.
    """
    return answer_of(resolved_of(fields), command(fields), name_a_gpu=f"Choose yours under {_label('gpu')}.")


def answer_of(resolved: Resolved, command: str, *, name_a_gpu: str = NAME_A_GPU) -> dict[str, object]:
    """Return the answer for a complete job and its command line; ``name_a_gpu``: the hint for a job without a GPU."""
    with remembering():
        return _answer_of(resolved, command, name_a_gpu)


def _answer_of(resolved: Resolved, command: str, name_a_gpu: str) -> dict[str, object]:
    answer = estimate(resolved.job)
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "headline": headline(answer),
        "job": "; ".join(job_lines(answer)),
        "verdict": verdict_sentence(answer, GIBIBYTES, name_a_gpu=name_a_gpu),
        "speed": _speed(resolved.job),
        "estimate": estimate_payload(answer, resolved.notes),
        "stages": plain(stages(resolved.job, answer)),
        "speeds": [_speed_at(resolved.job, stage) for stage in STAGES],
        "configurations": configurations(resolved.job),
    }


def _speed(job: JobSpec) -> dict[str, object]:
    """Return the modelled step time and the tokens/s per GPU, or in ``refusal`` the reason why there is none."""
    if job.cluster.gpu is None:
        return {"refusal": "not known without a GPU"}
    try:
        time = time_of(job)
    except SpecError as refused:
        return {"refusal": str(refused)}
    return {"step_s": float(time.seconds), "tokens_per_s_per_gpu": float(time.tokens_per_s), "refusal": ""}


def _speed_at(job: JobSpec, stage: Stage) -> dict[str, object]:
    """Return the speed under another ZeRO stage."""
    try:
        return _speed(at_stage(job, stage))
    except SpecError as refused:
        return {"refusal": str(refused)}


def step_payload(fields: Mapping[str, str]) -> dict[str, object]:
    """Return the memory over one step, and its collectives, for the controls' job."""
    return step_of(resolved_of(fields))


def step_of(resolved: Resolved) -> dict[str, object]:
    """Return the memory over one step, and its collectives, for a complete job."""
    answer = estimate(resolved.job)
    return {"schema_version": SCHEMA_VERSION, "step": plain(step(answer, timeline(resolved.job, own=answer)))}


def scaling_payload(fields: Mapping[str, str]) -> dict[str, object]:
    """Return a GPU's memory on 1, 2, 4 and more GPUs under each ZeRO stage, as ``zeroplan plot scaling`` draws it."""
    with remembering():
        found = scaling(resolved_of(fields).job)
    lines = [{**cast("dict[str, object]", plain(line)), "fits": line.fits_words} for line in found.lines]
    return {"schema_version": SCHEMA_VERSION, "capacity_bytes": found.capacity_bytes, "own": plain(found.own), "lines": lines}


def changes_payload(fields: Mapping[str, str]) -> dict[str, object]:
    """Return the verdict (from a replay, if only that can tell) and changes that would make the job fit.

    Each change has the values of the controls and its cost in speed.
    """
    resolved = resolved_of(fields)
    answer = replayed_if_tight(estimate(resolved.job))
    changes = [{**change._asdict(), "said": with_flags(fields, change.flags)} for change in remedies(answer)]
    return {"schema_version": SCHEMA_VERSION, **_judged(answer), "changes": changes}


def longest_payload(fields: Mapping[str, str]) -> dict[str, object]:
    """Return the longest sequences with which the controls' job fits its GPU. [tokens]"""
    return {"schema_version": SCHEMA_VERSION, **longest_sequences(resolved_of(fields).job)._asdict()}


def message_payload(fields: Mapping[str, str]) -> dict[str, object]:
    """Return what torch's out-of-memory message means for the controls' job; the key ``message`` has its text.

    Jobs that agree better, and changes that would fit, have the values of the controls.
    """
    job = {name: text for name, text in fields.items() if name != MESSAGE}
    found = explained(read_message(fields.get(MESSAGE, ""), where="the text"), resolved_of(job).job)
    others = [{"flags": one.flags, "said": with_flags(job, one.flags)} for one in found.others]
    changes = [{**one._asdict(), "said": with_flags(job, one.flags)} for one in found.changes]
    text = message_text(found, with_changes=False)
    return {"schema_version": SCHEMA_VERSION, "text": text, "others": others, "changes": changes}


def _judged(answer: Estimate) -> dict[str, object]:
    verdict = verdict_sentence(answer, GIBIBYTES, name_a_gpu=f"Choose yours under {_label('gpu')}.")
    return {"verdict": verdict, "fits": answer.fits}


def changes_of(resolved: Resolved) -> dict[str, object]:
    """Return the verdict and changes for a complete job, without values of controls."""
    answer = replayed_if_tight(estimate(resolved.job))
    return {"schema_version": SCHEMA_VERSION, **_judged(answer), "changes": [one._asdict() for one in remedies(answer)]}


def with_flags(fields: Mapping[str, str], flags: str) -> dict[str, str] | None:
    """Return the controls' values changed by these flags; None if a flag has no control.

    >>> with_flags({"model": "gpt2", "stage": "0"}, "--stage 3 --micro-batch 2")
    {'model': 'gpt2', 'stage': '3', 'micro_batch': '2'}
    """
    words = iter(shlex.split(flags))
    after = dict(fields)
    for flag in words:
        name, value = flag.removeprefix("--").replace("-", "_"), next(words, "")
        if name not in _controls() or value.startswith("--"):
            return None
        after[name] = f"{after[name]} {value}" if name == _SETTINGS and after.get(name) else value
    return after


def text_of(data: dict[str, object]) -> bytes:
    """Return an answer as JSON."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def plain(value: object) -> object:
    """Return a series as dicts and lists. ``dataclasses.asdict`` is too slow here, since it copies every text."""
    if isinstance(value, (str, int, float)) or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    return {name: plain(getattr(value, name)) for name in _names(cast("Hashable", type(value)))}


@cache
def _names(series: Hashable) -> tuple[str, ...]:
    return tuple(field.name for field in fields(series))  # type: ignore[arg-type]  # one of the series


def resolved_of(fields: Mapping[str, str]) -> Resolved:
    """Return the job of the controls; empty ones get the command line's defaults."""
    return resolve(request_of(fields), chosen=tuple(key.removeprefix("deepspeed.") for key in _set_keys(fields)))


def request_of(fields: Mapping[str, str]) -> Request:
    """Return the request for the controls, without defaults."""
    unknown = fields.keys() - _controls().keys()
    if unknown:
        raise SpecError(f"the page has no control {min(unknown)!r}; it has {', '.join(_controls())}")
    values = {
        name: _value(_controls()[name], text.strip()) for name, text in fields.items() if text.strip() and name != _SETTINGS
    }
    if "config" in values:
        return _with_settings(Request(**_of_content(values)), fields)  # type: ignore[arg-type]  # Request checks every field
    if "model" not in values:
        raise SpecError(f"{_label('model')} is empty; choose one from its list, or write a number of parameters, such as 7e9")
    name = str(values.pop("model"))
    return _with_settings(Request(**{_model_key(name): name}, **values), fields)  # type: ignore[arg-type]  # Request checks every field


def _of_content(values: dict[str, object]) -> dict[str, object]:
    """Return the values without the model's name, since they have a config.json. The page never reads a file of this machine."""
    if not is_content(str(values["config"])):
        raise SpecError(f"{_label('config')} is not the content of a config.json, which begins with {{")
    return {name: value for name, value in values.items() if name != "model"}


def _with_settings(request: Request, fields: Mapping[str, str]) -> Request:
    for setting in fields.get(_SETTINGS, "").split():
        request = with_setting(request, setting)
    return request


_SETTINGS = "set"


def _set_keys(fields: Mapping[str, str]) -> list[str]:
    return [setting.partition("=")[0] for setting in fields.get(_SETTINGS, "").split()]


def command(fields: Mapping[str, str]) -> str:
    """Return the command line for the same answer, without default values."""
    return shlex.join(("zeroplan", "estimate", *flags(fields)))


def flags(fields: Mapping[str, str]) -> Iterator[str]:
    """Yield the command line's flags for the controls, without default values."""
    for name, control in _controls().items():
        text = fields.get(name, "").strip()
        if name == "model" and fields.get("config", "").strip():
            continue
        if text and not _is_default(control, text):
            key = _model_key(text) if name == "model" else name
            if control.choices == SWITCH:
                yield "--" + key.replace("_", "-")
                continue
            for one in text.split() if name == _SETTINGS else (text,):
                yield from ("--" + key.replace("_", "-"), one)


def _is_default(control: Control, text: str) -> bool:
    """Whether a value is the command line's default."""
    return control.name in _SAME_BY_DEFAULT and text == control.default


_SAME_BY_DEFAULT = (
    "precision", "recompute", "optimizer", "attention", "loss", "micro_batch", "grad_accum", "replicas", "offload_optimizer",
    "offload_param", "keep_logits", "tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel",
    "sequence_parallel",
)  # fmt: skip


def _model_key(text: str) -> str:
    """Return the model's flag: ``params`` for a number of parameters, else ``model``."""
    try:
        parse_count(text, what="--params")
    except SpecError:
        return "model"
    return "params"


def _value(control: Control, text: str) -> object:
    if control.kind == "text":
        return text
    if control.kind == "number":
        if control.name == "seq_len":
            return parse_tokens(text, what=control.label)
        return parse_count(text, what=control.label, examples="8 or 1024")
    if text not in control.choices:
        raise _invalid_choice(control, text)
    if control.choices == SWITCH:
        return text == "yes"
    return KEEP_LOGITS[text] if control.name == "keep_logits" else int(text) if text.isdigit() else text


_FEW = 12


def _invalid_choice(control: Control, text: str) -> ZeroplanError:
    """Return the error, with all choices if they are few, else with the nearest ones."""
    choices = [choice for choice in control.choices if choice]
    if len(choices) > _FEW:
        return unknown_name(control.label, text, choices, "choose one from its list")
    return SpecError(f"{control.label} {text!r} is not offered; choose one of {', '.join(choices)}")
