"""The exceptions that zeroplan raises for users' mistakes and limits.

ZeroplanError            any of these: a message of one line, with the value and the way out
├── SpecError            the input describes something that cannot run or is not modelled (also a ValueError)
│   └── NoFormulasError  zeroplan has no formulas for the model, although it may run
├── UnknownNameError     no catalogue contains the name; the message lists the nearest ones (also a LookupError)
└── MeasurementError     a verification failed, or its record cannot be read
"""

from collections.abc import Iterable


class ZeroplanError(Exception):
    """The base class of zeroplan's exceptions."""


class SpecError(ZeroplanError, ValueError):
    """The input describes something that cannot run, or that zeroplan does not model."""


class NoFormulasError(SpecError):
    """zeroplan has no formulas for this configuration, although transformers may build a model from it."""


class UnknownNameError(ZeroplanError, LookupError):
    """No catalogue contains the name."""


class MeasurementError(ZeroplanError):
    """A verification failed, or its record cannot be read."""


def refuse(what: str, cases: Iterable[tuple[str | bool, str]], ending: str = "", *, says: str = "is not modelled") -> None:
    """Raise SpecError for the first case that a job asks for: its words, or False, and what to use instead.

    >>> refuse("loss 'fused' with", [(False, "a GPU"), ("a profile", "loss 'full'")])
    Traceback (most recent call last):
    zeroplan.errors.SpecError: loss 'fused' with a profile is not modelled; use loss 'full'
    """
    for refused, instead in cases:
        if refused:
            raise SpecError(f"{what} {refused} {says}; use {instead}{ending}".lstrip())


def unknown_name(what: str, name: str, known: Iterable[str], way_out: str) -> UnknownNameError:
    """Return the error for ``name``, with the nearest known names.

    >>> str(unknown_name("GPU", "h10", ["h100-sxm-80gb", "a10"], "`zeroplan gpus` lists all"))
    "unknown GPU 'h10'; nearest: a10, h100-sxm-80gb; `zeroplan gpus` lists all"
    """
    near = nearest(name, known)
    return UnknownNameError(f"unknown {what} {name!r}; {near}{'; ' * bool(near)}{way_out}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the nearest known names as words, such as ``nearest: a10, a100``; empty if none is near."""
    import difflib  # noqa: PLC0415  only errors need it

    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.3)
    near += [known_name for known_name in names if name.strip() and name.lower() in known_name and known_name not in near]
    return f"nearest: {', '.join(near[:5])}" if near else ""
