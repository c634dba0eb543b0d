"""What zeroplan raises on purpose.

ZeroplanError            anything below: one line, the value and the way out
├── SpecError            a description of something that could not run (also a ValueError)
│   └── NoFormulasError  a model that runs, and that zeroplan has no formulas for
├── UnknownNameError     a name no catalogue knows, with the nearest ones (also a LookupError)
└── MeasurementError     a verification that could not be carried out or read
"""

from collections.abc import Iterable


class ZeroplanError(Exception):
    """Anything zeroplan raises on purpose."""


class SpecError(ZeroplanError, ValueError):
    """A description of something that could not run."""


class NoFormulasError(SpecError):
    """A configuration that transformers may well build a model of, and that zeroplan has no formulas for."""


class UnknownNameError(ZeroplanError, LookupError):
    """A name that no catalogue knows."""


class MeasurementError(ZeroplanError):
    """A verification that could not be carried out or read."""


def unknown_name(what: str, name: str, known: Iterable[str], way_out: str) -> UnknownNameError:
    """Return the error for ``name``, with the nearest known names.

    >>> str(unknown_name("GPU", "h10", ["h100-sxm-80gb", "a10"], "`zeroplan gpus` lists all"))
    "unknown GPU 'h10'; nearest: a10, h100-sxm-80gb; `zeroplan gpus` lists all"
    """
    import difflib  # noqa: PLC0415  only an error pays for it

    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.3)
    near += [known_name for known_name in names if name.strip() and name.lower() in known_name and known_name not in near]
    hint = f"nearest: {', '.join(near[:5])}; " if near else ""
    return UnknownNameError(f"unknown {what} {name!r}; {hint}{way_out}")
