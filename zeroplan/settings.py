"""Parses an engine's own option, ``engine.option=value``, for the flag ``--set`` and for the page."""

from dataclasses import fields, replace

from zeroplan.errors import SpecError
from zeroplan.resolve import Request
from zeroplan.spec.recipe import DdpOptions, DeepSpeedOptions, Fsdp1Options, Fsdp2Options, MegatronOptions
from zeroplan.units import parse_count, parse_fraction

_GROUPS = {
    "ddp": DdpOptions,
    "fsdp1": Fsdp1Options,
    "fsdp2": Fsdp2Options,
    "deepspeed": DeepSpeedOptions,
    "megatron": MegatronOptions,
}
_NAMES = ("torch",)  # a release such as 2.15 stays text
_FRACTIONS = ("optimizer_offload_fraction",)


def with_setting(request: Request, setting: str) -> Request:
    """Return the request with ``engine.option=value`` applied; raises SpecError for another form or an unknown option."""
    key, equals, text = setting.partition("=")
    group, dot, option = key.partition(".")
    kind = _GROUPS.get(group)
    if not (equals and dot and kind):
        raise SpecError(f"--set {setting!r} is not engine.option=value; write deepspeed.reduce_bucket_size=5e7, say")
    names = [field.name for field in fields(kind)]
    if option not in names:
        raise SpecError(f"--set {setting!r}: {group} has no option {option!r}; it has {', '.join(names)}")
    now = getattr(request, group) or kind()
    return replace(request, **{group: replace(now, **{option: _value(option, text)})})


def _value(option: str, text: str) -> object:
    if option in _NAMES:
        return text
    if option in _FRACTIONS and (fraction := parse_fraction(text)) is not None:
        return fraction
    words = {"true": True, "false": False, "none": None, "null": None, "0": 0}
    if text.lower() in words:
        return words[text.lower()]
    return parse_count(text, what="--set value") if text[:1].isdigit() else text
