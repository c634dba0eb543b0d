"""The tools that an agent calls. Each answers one question with a small dictionary, and has no side effects.

They call the same functions as the command line. ``server.py`` has the protocol.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from zeroplan.catalog.gpu import gpu, gpu_names
from zeroplan.catalog.model import model, model_names
from zeroplan.differences import between, of_estimate
from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, estimate, judged
from zeroplan.export.command import estimate_command
from zeroplan.job_file import request_of_keys
from zeroplan.numeric import Int
from zeroplan.planner.asking import Question, ask
from zeroplan.planner.objectives import OBJECTIVES
from zeroplan.planner.result import Layout
from zeroplan.remedies import in_keys, remedies
from zeroplan.report.checks import Beside, loop_beside
from zeroplan.report.layout import layout_words
from zeroplan.report.words import headline, verdict_sentence
from zeroplan.resolve import OPTIONS, Request, Resolved, resolve
from zeroplan.resolve.options import Declared
from zeroplan.transformer.params import parameter_count
from zeroplan.units import GIB, GIBIBYTES

_MOST_LINES = 20
_MOST_NAMES = 40
_HUB = "hf:"

Answer = dict[str, object]
Arguments = Mapping[str, object]


class Tool(NamedTuple):
    """A tool: its name, a description that says when to call it, the schema of its arguments, and its function."""

    name: str
    description: str
    schema: dict[str, object]
    answer: Callable[[Arguments], Answer]


def called(name: str, arguments: Arguments) -> Answer:
    """Return a tool's answer. Raises :class:`~zeroplan.errors.ZeroplanError`, one line, for invalid arguments.

    >>> called("check", {"job": {"model": "gpt2", "gpus": 2, "gpu": "l4-24gb", "seq_len": 512}})["fits"]
    True
    """
    for tool in TOOLS:
        if tool.name == name:
            unknown = arguments.keys() - tool.schema["properties"].keys()  # type: ignore[attr-defined]  # a schema of ours
            if unknown:
                raise SpecError(f"{name} takes no {min(unknown)!r}; it takes {', '.join(tool.schema['properties'])}")  # type: ignore[arg-type]
            return tool.answer(arguments)
    raise SpecError(f"there is no tool {name!r}; there are {', '.join(tool.name for tool in TOOLS)}")


def _estimate(arguments: Arguments) -> Answer:
    resolved = _resolved(arguments)
    found = judged(resolved.job)
    return {
        **_verdict(found, loop_beside(resolved.job, resolved.loop)),
        "job": headline(found),
        "peak_moment": found.peak.name,
        "states_gib": {kind.value: _gib(n_bytes) for kind, n_bytes in found.states_by_kind.items() if n_bytes},
        "peak_by_kind_gib": _by_kind(found),
        "host_memory_per_rank_gib": _gib(found.host_bytes),
        "sent_per_step_gib": _gib(found.traffic.total_bytes),
        "changes_that_would_make_it_fit": [
            {"flags": one.flags, "what": one.change, "needed_gib": _gib(one.needed_bytes)}
            for one in in_keys(remedies(found), resolved.keys)
        ],
        "notes": list(resolved.notes),
        "command": estimate_command(resolved.job, _request(arguments)),
    }


def _check(arguments: Arguments) -> Answer:
    resolved = _resolved(arguments)
    if resolved.job.cluster.gpu is None:
        raise SpecError("check asks whether the job fits a GPU, but no GPU is named; add gpu to the job")
    return _verdict(judged(resolved.job), loop_beside(resolved.job, resolved.loop))


def _explain(arguments: Arguments) -> Answer:
    found = estimate(_resolved(arguments).job)
    lines = sorted(found.peak.lines, key=lambda line: -int(line.n_bytes))
    rest = lines[_MOST_LINES:]
    return {
        "job": headline(found),
        "peak_moment": found.peak.name,
        "peak_gib": _gib(found.peak_bytes),
        "lines": [
            {
                "kind": line.kind.value,
                "gib": _gib(line.n_bytes),
                "what": line.reason,
                "formula": line.formula,
                "source": line.source,
            }
            for line in lines[:_MOST_LINES]
        ],
        "smaller_lines": {"count": len(rest), "gib": _gib(sum(int(line.n_bytes) for line in rest))},
    }


def _plan(arguments: Arguments) -> Answer:
    request = _request(arguments)
    if request.gpu is None:
        raise SpecError("a plan must fit a GPU, and none is named; add gpu to the job")
    objective = _one_of("objective", arguments.get("objective", "throughput"), OBJECTIVES)
    batch = arguments.get("global_batch")
    if batch is not None and (not isinstance(batch, int) or isinstance(batch, bool) or batch < 1):
        raise SpecError(f"global_batch is {batch!r}; write how many sequences all GPUs take per step, such as 512")
    found = ask(request, Question(objective, batch))  # type: ignore[arg-type]  # one of the objectives
    best = found.best
    return {
        "fits": best is not None,
        "considered": found.considered,
        "best": None if best is None else {**_layout(best.layout, request), "limited_by": best.binding, "tight": best.tight},
        "others": [{**_layout(one.layout, request), "why_not": one.why_not} for one in found.rivals],
        "notes": list(found.notes),
    }


def _compare(arguments: Arguments) -> Answer:
    sides = [judged(_resolved(arguments, key).job) for key in ("before", "after")]
    found = between(*map(of_estimate, sides))
    return {
        "before": _verdict(sides[0]),
        "after": _verdict(sides[1]),
        "settings": [one._asdict() for one in found.settings],
        "peak_change_gib": _gib(found.peak.change_bytes),
        "change_by_kind_gib": {one.kind: _gib(one.change_bytes) for one in found.kinds if one.change_bytes},
        "sent_change_gib": _gib(sides[1].traffic.total_bytes - sides[0].traffic.total_bytes),
        "notes": list(found.notes),
    }


def _models(arguments: Arguments) -> Answer:
    names = _names(model_names(), arguments)
    shown = [(name, model(name)) for name in names[:_MOST_NAMES]]
    described = [
        {
            "name": name,
            "parameters": parameter_count(spec),
            "layers": spec.num_hidden_layers,
            "longest_sequence": spec.max_position_embeddings,
        }
        for name, spec in shown
    ]
    return {"models": described, "not_shown": max(0, len(names) - _MOST_NAMES)}


def _gpus(arguments: Arguments) -> Answer:
    names = _names(gpu_names(), arguments)
    shown = [(name, gpu(name)) for name in names[:_MOST_NAMES]]
    described = [
        {"name": name, "full_name": spec.full_name, "memory_gib": _gib(spec.memory_bytes.value)} for name, spec in shown
    ]
    return {"gpus": described, "not_shown": max(0, len(names) - _MOST_NAMES)}


def _verdict(found: Estimate, loop: Beside | None = None) -> Answer:
    """Return the verdict in words and numbers, of all phases of the loop if a file has one. [GiB]"""
    verdict = verdict_sentence(found, GIBIBYTES, name_a_gpu="Name yours as gpu.")
    return {
        "verdict": verdict if loop is None else f"{verdict} {loop.says}",
        "fits": found.fits if loop is None or loop.fits is not False else False,
        "tight": found.verdict == "tight",
        "peak_allocated_bytes": found.peak_bytes,
        "peak_allocated_gib": _gib(found.peak_bytes),
        "must_fit_gib": _gib(found.least_bytes),
        "reserved_gib": [_gib(found.reserved.low_bytes), _gib(found.reserved.high_bytes)],
        "gpu_gib": None if found.capacity_bytes is None else _gib(found.capacity_bytes),
    }


def _by_kind(found: Estimate) -> dict[str, float]:
    sums: dict[str, int] = {}
    for line in found.peak.lines:
        sums[line.kind.value] = sums.get(line.kind.value, 0) + int(line.n_bytes)
    return {kind: _gib(n_bytes) for kind, n_bytes in sorted(sums.items(), key=lambda one: -one[1])}


def _layout(one: Layout, request: Request) -> Answer:
    return {
        "layout": layout_words(one.job),
        "needed_gib": _gib(one.least_bytes),
        "step_s": round(one.seconds, 4),
        "tokens_per_s_per_gpu": round(one.tokens_per_s),
        "command": estimate_command(one.job, request),
    }


def _gib(n_bytes: Int) -> float:
    return float(round(int(n_bytes) / GIB, 3))


def _resolved(arguments: Arguments, key: str = "job") -> Resolved:
    return resolve(_request(arguments, key))


def _request(arguments: Arguments, key: str = "job") -> Request:
    """Return the request for a job's keys, the same as in a job file."""
    given = arguments.get(key)
    if not isinstance(given, dict):
        raise SpecError(f"{key} is {given!r:.60}; write an object with the keys of a job, such as model, gpu, gpus and stage")
    if str(given.get("model", "")).startswith(_HUB):
        raise SpecError("this server fetches nothing; download the model's config.json and name the file as config")
    keys = {key.replace("-", "_"): value for key, value in given.items()}
    if "from" in keys:
        keys["from_file"] = keys.pop("from")
    return request_of_keys(keys, where="job")


def _names(names: tuple[str, ...], arguments: Arguments) -> list[str]:
    """Return the names that contain every word of ``search``."""
    words = str(arguments.get("search", "")).lower().split()
    return [name for name in names if all(word in name for word in words)]


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise SpecError(f"{name} {value!r} is none of {', '.join(choices)}")
    return str(value)


_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
#: An option with so many choices, whose help is a list of them: the schema lists them anyway.
_MANY = 20


def _property(one: Declared) -> dict[str, object]:
    """Return the schema of one option. Numbers may be texts such as 7e9, as in a job file."""
    if one.choices:
        choices = [choice for check in one.checks for choice in check.choices]
        says = _short_help(one.help) if len(choices) < _MANY else one.help[one.help.rfind("(default") :]
        return {"enum": choices, "description": says}
    types = list(dict.fromkeys(_TYPES[check.type] for check in one.checks if check.type in _TYPES))
    only = types[0] if len(types) == 1 else types
    return {"type": only, "description": _short_help(one.help)} if types else {"description": _short_help(one.help)}


#: The longest description of an option that is given as it is. [characters]
_LONGEST = 150
_IN_BRACKETS = re.compile(r" \([^()]*\)")


def _short_help(help_text: str) -> str:
    """Return a help text, or the first sentence and the default of a long one, without remarks in brackets."""
    if len(help_text) <= _LONGEST:
        return help_text
    first, stop, rest = help_text.partition(". ")
    default = rest.rfind("(default")
    return f"{_IN_BRACKETS.sub('', first)}{stop}{rest[default:] if default >= 0 else ''}".strip()


def _job(what: str) -> dict[str, object]:
    properties = {name: _property(one) for name, one in OPTIONS.items() if one.help}
    engine = {"type": ["string", "array"], "description": "Options of the engine, such as fsdp2.reshard_after_forward=8."}
    return {"type": "object", "description": what, "properties": {**properties, "set": engine}, "additionalProperties": False}


def _schema(required: tuple[str, ...], **properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_A_JOB = _job("The training job: name a model (or params, or config), and what else is known.")
_ANOTHER_JOB = {"type": "object", "description": "A training job, with the keys of estimate's job."}
"""Only one tool's schema lists the keys: clients send every schema to their language model, which costs tokens."""
_SEARCH = {"type": "string", "description": "Words that the names must contain; leave it out for all."}

TOOLS: tuple[Tool, ...] = (
    Tool(
        "estimate",
        "How much memory does one GPU need for a training job, when is the peak, and does it fit? Exact to the engine's code. "
        "Names changes that would make it fit. Call this before you recommend a GPU, a batch or a ZeRO stage.",
        _schema(("job",), job=_A_JOB),
        _estimate,
    ),
    Tool(
        "check",
        "Does a training job fit its GPU? The verdict alone; the job must name a gpu.",
        _schema(("job",), job=_ANOTHER_JOB),
        _check,
    ),
    Tool(
        "explain",
        "What is alive at the peak, line by line: what it is, its formula and the place in the engine's code that allocates it.",
        _schema(("job",), job=_ANOTHER_JOB),
        _explain,
    ),
    Tool(
        "plan",
        "Which layout should be run on these GPUs? Searches engines, ZeRO stages, tensor, pipeline and expert parallelism, "
        "recomputation, offload and micro-batch. Takes seconds. The job names model, gpu, gpus and seq_len; what it fixes stays.",
        _schema(
            ("job",),
            job=_ANOTHER_JOB,
            global_batch={
                "type": "integer",
                "minimum": 1,
                "description": "Sequences of all GPUs per step. (default: about 4M tokens)",
            },
            objective={"enum": list(OBJECTIVES), "description": "What is best. (default: throughput)"},
        ),
        _plan,
    ),
    Tool(
        "compare",
        "What changes between two jobs: settings, peak by kind of memory, traffic, and both verdicts.",
        _schema(("before", "after"), before=_ANOTHER_JOB, after=_ANOTHER_JOB),
        _compare,
    ),
    Tool("models", "The models that zeroplan knows, with their sizes.", _schema((), search=_SEARCH), _models),
    Tool("gpus", "The GPUs that zeroplan knows, with the memory that torch sees.", _schema((), search=_SEARCH), _gpus),
)
