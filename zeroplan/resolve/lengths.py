"""If sequences differ in length, how long is the longest micro-batch of a run? It decides the peak.

That depends on the order of the data. Orders are drawn with a fixed seed, so the same lengths give the same answer.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from zeroplan.catalog.text import is_there, read_text
from zeroplan.errors import SpecError
from zeroplan.units import MIB

Drawn: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
#: The number of random orders, and the most lengths in all orders together.
_ORDERS: Final = 199
_MOST_DRAWN: Final = 20_000_000
_MOST_SEQUENCES: Final = _MOST_DRAWN // 9
#: The percentile of orders that decides: 95 % of runs have no longer micro-batch.
CAREFUL: Final = 95
_LOGNORMAL = re.compile(r"lognormal\(\s*([\d.]+)\s*,\s*([\d.]+)\s*,\s*(\d+)\s*\)")
_FORMS = "a file with one length per line nor lognormal(MEAN,SPREAD,SEQUENCES), for example lognormal(290,0.5,8000)"
_LARGEST_FILE: Final = 256 * MIB
_LONGEST: Final = 10**9
#: Fields of a record that contain its length or its token ids.
_FIELDS: Final = ("length", "num_tokens", "n_tokens", "token_count", "seq_len", "seq_length", "input_ids", "tokens")


class Lognormal(NamedTuple):
    """A distribution of lengths whose logarithm is normal."""

    mean: float
    """Mean length. [tokens]"""
    spread: float
    """Standard deviation of the logarithm."""
    sequences: int


class Longest(NamedTuple):
    """The length of a run's longest micro-batch, over the random orders."""

    micro_batches: int
    found: tuple[int, ...]
    """Tokens of the longest micro-batch of each order, ascending, with padding."""
    sequences: int
    """Sequences of a padded micro-batch; 1 without padding."""

    def within(self, percent: int) -> int:
        """Tokens per sequence of the longest micro-batch, at this percentile of the orders."""
        return self.found[min(len(self.found) - 1, percent * len(self.found) // 100)] // self.sequences


def lengths_of(text: str) -> Lognormal | Drawn:
    """Return the lengths or the distribution of ``--lengths``; raises SpecError for an unreadable file or invalid lengths."""
    match = _LOGNORMAL.fullmatch(text.strip())
    if match is None:
        return _of_file(text)
    found = Lognormal(float(match[1]), float(match[2]), int(match[3]))
    if not (1 <= found.mean <= 1e9 and found.spread <= 5 and 1 <= found.sequences <= _MOST_SEQUENCES):
        raise SpecError(f"--lengths {text!r}: MEAN is 1 to 1e9 tokens, SPREAD 0 to 5, SEQUENCES 1 to {_MOST_SEQUENCES:,}")
    return found


def _of_file(text: str) -> Drawn:
    name, field = (text, "") if is_there(Path(text)) else text.rpartition(":")[::2]
    if not name or not is_there(Path(name)):
        raise SpecError(f"--lengths {text!r} is neither {_FORMS}")
    content = read_text(Path(name), what="file of lengths", most=_LARGEST_FILE)
    try:
        records = content.lstrip().startswith("{") or bool(field)
        lines = _of_records(content, name, field) if records else map(int, content.split())
        found = np.fromiter(lines, dtype=np.int64)
    except SpecError:
        raise
    except (ValueError, OverflowError):
        raise SpecError(f"--lengths {text!r} is neither {_FORMS}") from None
    if not 1 <= len(found) <= _MOST_SEQUENCES or found.min() < 1 or found.max() > _LONGEST:
        raise SpecError(f"--lengths {text!r}: a file has 1 to {_MOST_SEQUENCES:,} lengths of 1 token or more, 1e9 at the most")
    return found


def _of_records(content: str, name: str, field: str) -> Iterator[int]:
    """Yield the length of each record of a JSON Lines file, from a field with the number of tokens or their ids."""
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            record = _record(line, f"{name!r}, line {number}")
            value = next((record[one] for one in ([field] if field else _FIELDS) if one in record), None)
            if isinstance(value, bool) or not isinstance(value, (int, list)):
                raise SpecError(f"--lengths {name!r}, line {number}: {_no_length(record, field)}")
            yield len(value) if isinstance(value, list) else value


def _record(line: str, where: str) -> dict[str, object]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SpecError(f"--lengths {where}: not a JSON record; a file has one record per line, or one length per line")
    return found


def _no_length(record: dict[str, object], field: str) -> str:
    has = ", ".join(map(repr, list(record)[:4])) or "nothing"
    if field:
        return f"its field {field!r} is no number of tokens and no list of them; the record has {has}"
    return (
        f"a record with {has} and no length; zeroplan has no tokenizer: write len(tokenizer(text)['input_ids']) of each record "
        "to a file, one per line, or name the field that has its length or token ids, as FILE:FIELD"
    )


def longest_of(lengths: Lognormal | Drawn, *, cut: int, micro_batch: int, padding_free: bool) -> Longest:
    """Return the longest micro-batch of each random order; sequences are cut to ``cut`` tokens. A smaller last one counts too.

    Padding makes all sequences of a micro-batch as long as its longest; ``padding_free`` joins them.
    """
    draw = np.random.default_rng(0)
    count = lengths.sequences if isinstance(lengths, Lognormal) else len(lengths)
    found = []
    alike = not padding_free and not isinstance(lengths, Lognormal)  # in every order, the longest sequence decides
    for _ in range(1 if alike else max(9, min(_ORDERS, _MOST_DRAWN // count))):
        order = _drawn(lengths, draw) if isinstance(lengths, Lognormal) else draw.permutation(lengths)
        cut_off = np.minimum(order, cut)
        starts = np.arange(0, count, micro_batch)
        joined = np.add if padding_free else np.maximum
        tokens = int(joined.reduceat(cut_off, starts).max())
        found.append(tokens if padding_free else tokens * micro_batch)
    return Longest(-(-count // micro_batch), tuple(sorted(found)), 1 if padding_free else micro_batch)


def _drawn(lengths: Lognormal, draw: np.random.Generator) -> Drawn:
    middle = np.log(lengths.mean) - lengths.spread**2 / 2
    return np.ceil(draw.lognormal(middle, lengths.spread, lengths.sequences)).astype(np.int64)


def drawn_once(lengths: Lognormal | Drawn) -> Drawn:
    """Return the lengths of a file, or one draw from a distribution."""
    return _drawn(lengths, np.random.default_rng(0)) if isinstance(lengths, Lognormal) else lengths


def note_of(longest: Longest, seq_len: int, *, drawn: bool) -> str:
    """Return a note on the assumed micro-batch and other orders; ``drawn``: lengths are from a distribution."""
    each, half = (f"{longest.sequences} x {tokens:,}" for tokens in (seq_len, longest.within(50)))
    return (
        f"sequences differ in length: the estimate is for the longest of {longest.micro_batches:,} micro-batches, "
        f"{each} tokens. {CAREFUL} of 100 orders of the sequences have no longer one; half have none longer than {half}"
        + (". These lengths are drawn; real data can have a longer sequence, so prefer a file" if drawn else "")
    )
