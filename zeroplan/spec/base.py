"""The base class of a job's descriptions: a frozen dataclass that checks the type and range of every field.

pydantic is not imported for them, since that takes longer than an answer. :func:`read` builds them from files and other foreign
data with pydantic, which checks types, unknown keys and nesting against the same classes. Both use the same ranges and
rules.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from zeroplan.errors import SpecError

if TYPE_CHECKING:
    from inspect import Signature

    from pydantic import TypeAdapter, ValidationError


class Range(NamedTuple):
    """The smallest and largest value of an int or float field."""

    low: float
    high: float


#: Counts in a description. The limits keep every product of interest within int64.
Count = Annotated[int, Range(1, 10**15)]
CountOrZero = Annotated[int, Range(0, 10**15)]
Dimension = Annotated[int, Range(1, 10**7)]
#: The most ranks of a job, for one degree of parallelism and for their product.
MOST_RANKS = 10**6
Degree = Annotated[int, Range(1, MOST_RANKS)]


class _SignatureOfFields:
    """The signature that ``inspect`` and ``help`` show for a description: one keyword per field."""

    def __get__(self, _: object, cls: type["Spec"]) -> "Signature":
        """Return the class's signature."""
        from inspect import Parameter, Signature  # noqa: PLC0415  only documentation needs it

        return Signature(
            [
                Parameter(
                    one.name,
                    Parameter.KEYWORD_ONLY,
                    default=Parameter.empty if one.default is MISSING else one.default,
                    annotation=one.type,
                )
                for one in fields(cls)
            ]
        )


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Spec:
    """A frozen description, whose annotated names are keyword-only fields of a dataclass.

    Equal descriptions are equal and hash alike. Raises :class:`~zeroplan.errors.SpecError` when a field has the wrong type or is
    out of its range. A subclass needs no decorator. Its methods are those below: ``dataclass`` would compile six for each class,
    which takes longer than most answers.
    """

    __slots__ = ("__dict__", "__weakref__", "_hash")
    _hash: int
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    __signature__: ClassVar[_SignatureOfFields] = _SignatureOfFields()
    _defaults: ClassVar[Mapping[str, object]] = {}
    """The fields in their order. One without a default has ``MISSING``."""
    _required: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        """Collect the fields."""
        dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
        cls._defaults = {one.name: one.default for one in fields(cls)}
        cls._required = frozenset(name for name, default in cls._defaults.items() if default is MISSING)

    def __init__(self, **said: object) -> None:
        """Set every field, then check. Raises TypeError for a missing or unknown keyword, SpecError for a wrong value."""
        if not self._defaults.keys() >= said.keys() >= self._required:
            raise TypeError(self._wrong_keywords(said))
        self.__dict__.update(self._defaults)
        self.__dict__.update(said)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check every field, then the rules between fields."""
        values = self.__dict__
        for name, admissible, plain, choices, low, high in _to_check(type(self)):  # type: ignore[arg-type]  # mypy takes __hash__ for the class's
            value = values[name]
            kind = type(value)
            if kind in plain or (kind is int and low <= value <= high) or (kind in choices and value in choices[kind]):
                continue
            if not any(check.admits(value) for check in admissible):
                raise SpecError(f"{name}={value!r} is not {_accepted(admissible)}{_suggestion(value, admissible)}")
        self.check_rules()

    def __eq__(self, other: object) -> bool:
        """Whether the other is of the same class with equal fields."""
        return self.__dict__ == other.__dict__ if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self) -> int:
        """Return a hash of the fields, which is kept: a search asks often. Raises TypeError if a field is mutable."""
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash(tuple(map(self.__dict__.__getitem__, self._defaults))))
            return self._hash

    def __getstate__(self) -> dict[str, object]:
        """Return the fields for a copy and for pickle, without the hash: that of a text differs between processes."""
        return self.__dict__

    def __repr__(self) -> str:
        """Return the call that makes an equal description."""
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._defaults)})"

    def __setattr__(self, name: str, value: object) -> None:
        """Raise FrozenInstanceError."""
        raise FrozenInstanceError(f"cannot assign to field {name!r}; dataclasses.replace makes a changed copy")

    def __delattr__(self, name: str) -> None:
        """Raise FrozenInstanceError."""
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    @classmethod
    def _wrong_keywords(cls, keywords: Mapping[str, object]) -> str:
        """Return what is wrong with the keywords of a call."""
        unknown = [name for name in keywords if name not in cls._defaults]
        lacks = [name for name in cls._defaults if name in cls._required and name not in keywords]
        wrong = f"has no field {unknown[0]!r}" if unknown else f"needs {', '.join(lacks)}"
        return f"{cls.__name__}() {wrong}"

    def check_rules(self) -> None:
        """Raise SpecError if fields contradict each other."""


class Check(NamedTuple):
    """One accepted type of a field, with its bounds or choices."""

    type: type
    bounds: Range | None
    choices: tuple[object, ...]
    """The accepted values of a ``Literal``, whose ``type`` is ``object``."""
    wording: str

    def admits(self, value: object) -> bool:
        """Whether a value is of this type and within its bounds, or is one of the choices."""
        if self.choices:
            return value in self.choices and isinstance(value, bool) == isinstance(self.choices[0], bool)
        if not isinstance(value, self.type) or (isinstance(value, bool) and self.type is not bool):
            return False
        return self.bounds is None or (isinstance(value, (int, float)) and self.bounds.low <= value <= self.bounds.high)


def checks_of(cls: type[Spec]) -> Mapping[str, tuple[Check, ...]]:
    """Return the accepted types and values of each field, by the field's name and in order."""
    return _read_once(cls)  # type: ignore[arg-type]  # as above


@cache
def _read_once(cls: type[Spec]) -> Mapping[str, tuple[Check, ...]]:
    types: dict[str, object] = {field.name: field.type for field in fields(cls)}
    if any(isinstance(one, str) for one in types.values()):  # of a module with `from __future__ import annotations`
        types = get_type_hints(cls, include_extras=True)
    return {name: tuple(_checks(types[name])) for name in cls._defaults}


@cache
def _to_check(
    cls: type[Spec],
) -> tuple[tuple[str, tuple[Check, ...], frozenset[type], dict[type, frozenset[object]], int, int], ...]:
    """Return each field's name and checks; and of the values that pass: whole types, choices by type, and the range of ints.

    A search needs the last three, since it makes thousands of descriptions.
    """
    return tuple(
        (
            name,
            checks,
            frozenset(check.type for check in checks if not check.choices and check.bounds is None),
            _by_type(checks),
            *(bounds_of(cls, name) or (1, 0)),
        )
        for name, checks in checks_of(cls).items()
    )


def _by_type(checks: tuple[Check, ...]) -> dict[type, frozenset[object]]:
    choices = [choice for check in checks for choice in check.choices if check.admits(choice)]
    return {kind: frozenset(one for one in choices if type(one) is kind) for kind in set(map(type, choices))}


def bounds_of(cls: type[Spec], field: str) -> tuple[int, int] | None:
    """Return the smallest and the largest integer that a field accepts; None without such bounds."""
    found = (check.bounds for check in checks_of(cls)[field] if check.type is int and check.bounds is not None)
    return next(((int(bounds.low), int(bounds.high)) for bounds in found), None)


def _accepted(admissible: tuple[Check, ...]) -> str:
    """Return the words for a field's accepted values; None, which leaves the field out, is not mentioned."""
    wordings = [check.wording for check in admissible if check.wording and check.type is not NoneType]
    return " or ".join(wordings) or "nothing"


def _suggestion(value: object, admissible: tuple[Check, ...]) -> str:
    from zeroplan.synonyms import meant  # noqa: PLC0415  only an error pays for it

    choices = [str(choice) for check in admissible for choice in check.choices]
    if value == "all" and choices:
        return "; `zeroplan plan` compares them"
    near = meant(value, choices) if isinstance(value, str) else ""
    return f"; nearest: {near}" if near else ""


def _checks(hint: object, bounds: Range | None = None) -> list[Check]:
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *extras = get_args(hint)
        return _checks(inner, next((extra for extra in extras if isinstance(extra, Range)), None))
    if origin in (Union, UnionType):
        return [check for arm in get_args(hint) for check in _checks(arm)]
    if origin is Literal:
        return [Check(object, None, get_args(hint), f"one of {', '.join(map(str, get_args(hint)))}")]
    plain = origin or hint
    if not isinstance(plain, type):
        raise TypeError(f"a spec field cannot be a {hint}")
    return [Check(plain, bounds, (), _wording(plain, bounds))] + ([Check(int, bounds, (), "")] if plain is float else [])


def _wording(plain: type, bounds: Range | None) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "nothing"}
    name = names.get(plain, f"a {plain.__name__}")
    return name if bounds is None else f"{name} from {bounds.low:,} to {bounds.high:,}"


S = TypeVar("S")
#: Types of pydantic's errors whose value is not shown.
_WITHOUT_VALUE = ("value_error", "missing", "unexpected_keyword_argument", "extra_forbidden")
#: pydantic appends these names to an error's location in unions such as ``str | int``. Below, plainer words for its messages.
_UNION_ARMS = ("str", "int", "float", "bool")
_WORDS = {
    "unexpected_keyword_argument": "no such key", "missing": "is missing", "int_type": "is no whole number",
    "bool_type": "is neither true nor false", "string_type": "is no text",
}  # fmt: skip


def read(cls: type[S], data: Mapping[str, object], *, where: str) -> S:
    """Return a spec built strictly from foreign data (a parsed TOML or JSON object).

    Raises :class:`~zeroplan.errors.SpecError` in one line that names ``where``, the key and the value: unknown keys, missing
    ones, wrong types, values out of range, contradictions.
    """
    import json  # noqa: PLC0415  only foreign data needs json and pydantic

    from pydantic import ValidationError  # noqa: PLC0415

    try:
        return cast("S", _reader(cls).validate_json(json.dumps(data, default=str)))  # type: ignore[arg-type]  # as above
    except ValidationError as error:
        raise SpecError(f"{where}: {_in_one_line(error, cls)}") from None


@cache
def _reader(cls: type) -> "TypeAdapter[object]":
    """Return pydantic's reader of a class; cached, since building it takes longer than running it."""
    from pydantic import TypeAdapter  # noqa: PLC0415

    return TypeAdapter(cls)


def _in_one_line(error: "ValidationError", cls: type) -> str:
    """Return the most useful error in one line. A misspelt key also counts as missing; the error about the misspelling wins."""
    errors = error.errors(include_url=False)
    first = next((one for one in errors if one["type"] == "unexpected_keyword_argument"), errors[0])
    loc = first["loc"][:-1] if first["loc"][1:] and first["loc"][-1] in _UNION_ARMS else first["loc"]
    key = ".".join(str(part) for part in loc).encode("unicode_escape").decode("ascii")
    wrong = _WORDS.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    if first["type"] == "unexpected_keyword_argument" and len(loc) == 1:
        wrong += nearest_fields(cls, str(loc[0]))
    shown = "" if first["type"] in _WITHOUT_VALUE else f" (it is {first['input']!r:.80})"
    return f"{key + ': ' if key else ''}{wrong}{shown}"


def nearest_fields(cls: type, key: str) -> str:
    """Return a suggestion for an unknown key, as the end of a sentence: zeroplan's name for it, or the nearest spelling."""
    import difflib  # noqa: PLC0415  only an error pays for it

    from zeroplan.synonyms import ours_for  # noqa: PLC0415

    names, ours = [field.name for field in fields(cls)], ours_for(key)
    if ours.partition("=")[0] in names:
        return f"; here it is {ours}"
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
    return f"; nearest: {', '.join(near)}" if near else f"; there are {', '.join(names)}"
