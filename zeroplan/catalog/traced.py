"""Configurations of well-known models without formulas, which are traced where torch is: encoders, Gemma 4 E2B and others.

One file each in ``traced/``: the keys of its ``config.json`` that size the model and, as ``zeroplan``, their source, the number of
parameters of transformers' class, and what the makers say.
"""

from pathlib import Path

from zeroplan.catalog.lookup import normal

_FOLDER = Path(__file__).parent / "traced"


def traced_names() -> tuple[str, ...]:
    """Return the names of these models, sorted."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))


def traced_config(name: str) -> Path | None:
    """Return the ``config.json`` of a model by its name, with or without an owner; the beginning of one name is enough.

    >>> [found and found.name for found in map(traced_config, ("google-t5/t5-base", "Bert Large", "t5"))]
    ['t5-base.json', 'bert-large-uncased.json', None]
    """
    wanted, names = normal(name.rpartition("/")[2]), traced_names()
    found = [one for one in names if one == wanted] or [one for one in names if wanted and one.startswith(f"{wanted}-")]
    return _FOLDER / f"{found[0]}.json" if len(found) == 1 else None
