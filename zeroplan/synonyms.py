"""Translates other programs' names of flags, keys and values to zeroplan's, for error messages.

Users type the words of the program that they know. zeroplan does not accept them as aliases, since two names for one option must
be kept the same for ever; its error names the right one.
"""

import tomllib
from functools import cache
from pathlib import Path


@cache
def elsewhere() -> dict[str, str]:
    """Return the names in other programs, separated by blanks, of each of zeroplan's (``synonyms.toml``)."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def _ours() -> dict[str, str]:
    return {theirs: ours for ours, names in elsewhere().items() for theirs in names.split()}


def ours_for(name: str) -> str:
    """The name in zeroplan for another program's flag or key, ``name`` or ``name=value``; empty if unknown.

    >>> ours_for("--batch-size"), ours_for("gradient_checkpointing"), ours_for("colour")
    ('micro_batch', 'recompute=full', '')
    """
    return _ours().get(name.strip("-").lower().replace("-", "_"), "")


def meant(value: str, choices: list[str]) -> str:
    """The choice that a mistyped value probably means: its first or last words, or the nearest spelling; empty if none.

    >>> optimizers = ["adamw", "adam", "adamw-8bit"]
    >>> [meant(value, optimizers) for value in ("AdamW", "adamw_torch", "paged_adamw_8bit", "adamw8bit", "prodigy")]
    ['adamw', 'adamw', 'adamw-8bit', 'adamw-8bit', '']
    >>> meant("zero3", ["0", "1", "2", "3"]), meant("flash_attention_2", ["sdpa", "flash", "eager"])
    ('3', 'flash')
    >>> meant("4bit", ["none", "nf4", "nf4-double", "gptq"])
    'nf4'
    """
    import difflib  # noqa: PLC0415  only an error pays for it

    folded = value.lower().replace("_", "-")
    folded = {"4bit": "nf4", "4-bit": "nf4", "int4": "nf4", "qlora": "nf4"}.get(folded, folded)
    words = [one for one in choices if f"{folded}-".startswith(f"{one}-") or f"-{folded}".endswith(f"-{one}")]
    near = [max(words, key=len)] if words else difflib.get_close_matches(folded, choices, n=1, cutoff=0.6)
    return next(iter(near or [choice for choice in choices if folded.endswith(choice)]), "")
