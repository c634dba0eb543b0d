"""Copies a record without anything that identifies a machine, a person or a private model. Needs no torch.

The copy keeps all numbers, and texts on an allow-list: names in the catalogue, the package's own words, versions.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from zeroplan.catalog.gpu import gpus
from zeroplan.catalog.model import model_names
from zeroplan.catalog.text import shown, written_json
from zeroplan.errors import SpecError
from zeroplan.ledger import Beside, Kind, Phase
from zeroplan.records import is_results, read_record
from zeroplan.script_card import RankOnCard
from zeroplan.spec.base import Spec, checks_of, read
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.params import layout
from zeroplan.verify.cases.needs import OF_THE_DRIVER
from zeroplan.verify.cases.results import Result, read_results
from zeroplan.verify.record import record_name

S = TypeVar("S", bound=Spec)
Kept = Callable[[str], str]
"""Returns the part of a text to keep; empty for none."""

_CALLS = "all_gather|all_reduce|reduce_scatter|reduce|broadcast|all_to_all|gather|scatter|send|recv|barrier"
_DTYPES = r"b?float\d{1,2}(?:_e\dm\d(?:fn)?)?|u?int\d{1,2}|bool"
_VERSION = r"\d{1,5}(?:\.\d{1,5}){0,3}"
_SYSTEM = re.compile(rf"(Linux|Windows|macOS)-(?:({_VERSION})\b)?.*?(x86_64|aarch64|arm64|AMD64)?(?:-with-(glibc{_VERSION}))?")
#: Words in the GPU names that drivers report: ``NVIDIA A100-SXM4-40GB MIG 3g.20gb``.
_CARD = (
    r"NVIDIA|AMD|GeForce|Quadro|Tesla|Instinct|Radeon|RTX|GTX|TITAN|GRID|Graphics|Generation|Ada|Blackwell|Server|Workstation|Edition|"
    r"Max-Q|Laptop|GPU|Ti|SUPER|PRO|SXM\d?|PCIe|PCIE|NVL|OAM|MIG|HBM\d?e?|VF|\d{1,3}GB|\d{1,2}g\.\d{1,3}gb|[A-Z]{1,2}\d{1,4}[A-Z]{0,2}|\d{3,4}"
)


def _matching(pattern: str) -> Kept:
    whole = re.compile(pattern, re.ASCII)
    return lambda text: text if whole.fullmatch(text) else ""


def _platform(text: str) -> str:
    """System, kernel version, processor and C library, without a site's own suffixes."""
    found = _SYSTEM.fullmatch(text)
    return "" if found is None else "-".join(part for part in found.groups() if part)


def _of_a_gpu(text: str) -> str:
    return text if text in _texts_of_gpus() else ""


def _described(text: str) -> str:
    return _of_a_gpu(text) or "left out"  # these fields must not be empty


@cache
def _texts_of_gpus() -> frozenset[str]:
    return frozenset((OF_THE_DRIVER, *_texts([asdict(one) for one in gpus()])))


def _texts(data: object) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, (Mapping, list, tuple)):
        for one in (*data, *data.values()) if isinstance(data, Mapping) else data:
            yield from _texts(one)


_nothing, _same = _matching(""), _matching("(?s:.*)")
_GPU = rf"(?:NVIDIA|AMD|Tesla|Quadro)(?:[ -](?:{_CARD}))+"
_version, _gpu_name = _matching(_VERSION), _matching(_GPU)
_release = _matching(rf"{_VERSION}(?:(?:a|b|rc|\.post|\.dev)\d{{1,8}})?(?:\+(?:cpu|cu\d{{2,3}}|rocm{_VERSION}))?")
_operator = r"aten(?:::|\.)[a-z0-9_]+(?:\.[a-zA-Z0-9_]+)?"
_phase, _kind = _matching("|".join((*Phase, *Beside))), _matching("|".join(Kind))
_day = _matching(r"\d{4}(?:-\d\d){0,2}")
_figure = {"source": _described, "note": _of_a_gpu, "check": _of_a_gpu, "as_of": _day}
#: The rule for the texts of each field; texts of all other fields are dropped.
KEPT: dict[str, Kept] = {
    "ModelSpec.name": lambda text: text if text in model_names() else "",
    "AdapterSpec.targets": _same, "AdapterSpec.bitsandbytes": _same, "FrozenSpec.parts": _same,  # Spec checks these itself
    "RecipeSpec.fused_kernels": _same, "RecipeSpec.pipeline_layers": _same, "MegatronOptions.recompute_modules": _same,
    "RecipeSpec.transformers": _version, "MegatronOptions.hybrid_layer_pattern": _matching(r"[M*E-]+"),
    **{f"GpuSpec.{name}": _described for name in ("name", "full_name", "architecture", "node_link")},
    "GpuSpec.compute_capability": _matching(r"\d{1,2}\.\d|gfx\d{3,4}[a-z]?"),
    **{f"GpuSpec.{name}": _of_a_gpu for name in ("aliases", "network_link", "dense_flops_per_s")},
    **{f"{cls}.{name}": kept for cls in ("Figure", "ByteFigure") for name, kept in _figure.items()},
    "SharesSpec.source": _described,
    "Environment.python": _release, "Environment.platform": _platform, "Environment.date": _day,
    "Environment.device": _matching(rf"{_GPU}, CUDA {_VERSION}, driver (?:{_VERSION}|unknown)"), "Environment.packages": _release,
    "CardMeasured.name": _gpu_name, "Result.card": _gpu_name,
    "CardMeasured.driver": _version, "CardMeasured.cuda": _version, "CardMeasured.nccl": _version,
    "PhaseMeasured.phase": _phase, "CollectiveMeasured.phase": _phase, "OnCardMeasured.phase": _phase,
    "PhaseMeasured.kinds": _kind, "StepMeasured.held_kinds": _kind,
    "PhaseMeasured.operation": _matching(rf"{_operator}(?: > {_operator})*"), "AttentionMeasured.operators": _matching(_operator),
    "CollectiveMeasured.operation": _matching(_CALLS), "CollectiveMeasured.dtype": _matching(_DTYPES),
}  # fmt: skip

#: The rule for the keys of a table whose values have another rule.
KEYS = {"Environment.packages": _matching("zeroplan|torch|transformers|deepspeed|accelerate")}
#: Words in module names that no tensor name contains: the parts in front of a block.
_AROUND, _LAYER = ("", "model", "layers", "transformer", "h", "gpt_neox"), re.compile(r"\d{1,4}|\*", re.ASCII)


class Shared(NamedTuple):
    """A copy's content and file name, and its changed texts: the field, the original text, and the part kept."""

    name: str
    content: str
    left_out: tuple[tuple[str, str, str], ...]


def shared(path: Path) -> Shared:
    """The copy of a record, of a matrix's results, or of the JSON that ``zeroplan dryrun --backend cuda`` prints.

    Raises :class:`~zeroplan.errors.SpecError` for any other file, and for a run that only its owner can repeat.
    """
    copy = _Copy(str(path))
    if is_results(path):
        rows = [copy.of_result(one, number) for number, one in enumerate(read_results(path), 1)]
        return Shared("results.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows), tuple(dict.fromkeys(copy.left_out)))
    data = written_json(path, what="record")
    if isinstance(data, dict) and isinstance(data.get("measured"), list):
        name, found = "script-on-gpus.json", copy.of_script(data)
    else:
        record = read_record(path)
        copy.begin(record.workload, record.job.model)
        kept = copy.of(record, "")
        name, found = record_name(kept), asdict(kept)
    return Shared(name, json.dumps(found, indent=1) + "\n", tuple(dict.fromkeys(copy.left_out)))


class _Copy:
    """Copies records field by field and lists the texts that it leaves out."""

    def __init__(self, where: str) -> None:
        self.left_out: list[tuple[str, str, str]] = []
        self._where = where
        self._modules: frozenset[str] = frozenset()

    def of_script(self, data: Mapping[str, object]) -> dict[str, object]:
        """A script's measured ranks, without the dry run: it names the script, and anyone can repeat it."""
        self.left_out += [(key, "", "") for key in data if key not in ("schema_version", "measured")]
        found = cast("list[Mapping[str, object]]", data["measured"])
        ranks = [read(RankOnCard, one, where=f"record {self._where!r}") for one in found]
        return {"schema_version": 1, "measured": [asdict(self.of(one, "measured")) for one in ranks]}

    def of_result(self, result: Result, number: int) -> dict[str, object]:
        """One line of a matrix's results; a number replaces the case's name."""
        self.begin(result.task.workload, result.task.job.model)
        return asdict(replace(self.of(result, ""), name=f"case {number}"))

    def of(self, spec: S, where: str) -> S:
        """A copy of a Spec with the field's rule applied to each text."""
        checks, name = checks_of(type(spec)), type(spec).__name__
        kept = {}
        for field in fields(spec):
            value, here = getattr(spec, field.name), f"{where}.{field.name}".lstrip(".")
            chosen = isinstance(value, str) and any(value in check.choices for check in checks[field.name])
            kept[field.name] = value if chosen else self._value(value, here, f"{name}.{field.name}")
        return type(spec)(**kept)

    def _value(self, value: object, where: str, field: str) -> object:
        if isinstance(value, str):
            return self._text(value, where, KEPT.get(field, _nothing) if field != "PhaseMeasured.module" else self._module)
        if isinstance(value, Mapping):
            kept = KEYS.get(field) or KEPT.get(field, _nothing)
            pairs = [(self._text(key, where, kept), self._value(one, f"{where}.{key}", field)) for key, one in value.items()]
            return {key: one for key, one in pairs if key}
        if isinstance(value, Sequence):
            return tuple(one for one in (self._value(one, where, field) for one in value) if one != "")
        return self.of(value, where) if isinstance(value, Spec) else value

    def _text(self, text: str, where: str, rule: Kept) -> str:
        kept = rule(text)
        if kept != text:
            self.left_out.append((where, text, kept))
        return kept

    def _module(self, text: str) -> str:
        return text if all(word in self._modules or _LAYER.fullmatch(word) for word in text.split(".")) else ""

    def begin(self, workload: str, model: ModelSpec) -> None:
        """Refuse runs that only their owner can repeat, and collect the words allowed in this model's module names."""
        if workload or model.profile is not None:
            own = f"the workload {shown(workload)}" if workload else "a traced profile"
            raise SpecError(f"record {self._where!r} is of {own}, which nobody else can run; share the record of a job")
        found = layout(model)
        parts = (*found.embeddings, *(one for run in found.runs for one in run.parameters), *found.tail)
        self._modules = frozenset((*_AROUND, *(word for one in parts for word in one.name.split("."))))
