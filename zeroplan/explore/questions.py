"""One question of the page, by its address, to one answer. The server calls it, and so does the page that computes in the browser.

Nothing here imports the server's libraries, or NumPy: a browser's Python has the standard library alone.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from urllib.parse import parse_qsl, urlsplit

from zeroplan.catalog.text import shown
from zeroplan.errors import SpecError, ZeroplanError
from zeroplan.explore.answers import (
    answer_payload,
    changes_payload,
    controls_payload,
    longest_payload,
    message_payload,
    scaling_payload,
    step_payload,
    text_of,
)

Said = tuple[tuple[str, str], ...]
"""The fields of a question, sorted."""
OK, REFUSED = 200, 422
"""The HTTP status of an answer, and of a question whose fields are no job."""
ANSWERS: dict[str, Callable[[Mapping[str, str]], dict[str, object]]] = {
    "answer": answer_payload, "step": step_payload, "changes": changes_payload, "scaling": scaling_payload,
    "longest": longest_payload, "message": message_payload,
}  # fmt: skip


def once(fields: Iterable[tuple[str, str]]) -> Said:
    """Return the fields of a question, sorted; raises SpecError for one that is there twice."""
    said = tuple(sorted(fields))
    twice = next((name for (name, _), (other, _) in pairwise(said) if name == other), None)
    if twice is not None:
        raise SpecError(f"{shown(twice)} is there twice; keep one")
    return said


def answered(what: str, fields: Iterable[tuple[str, str]]) -> tuple[int, bytes]:
    """Return the HTTP status and the JSON of the answer to a question of ``ANSWERS``."""
    try:
        return OK, _answer(what, once(fields))
    except ZeroplanError as error:
        return REFUSED, text_of({"error": str(error)})


@lru_cache(maxsize=128)  # a step is up to 200 kB
def _answer(what: str, said: Said) -> bytes:
    """Return an answer's bytes. A cache serves repeated questions, as when a slider moves back and forth."""
    return text_of(ANSWERS[what](dict(said)))


def in_browser(address: str) -> tuple[int, str]:
    """Return status and content for an address of the page, such as ``/api/answer?model=gpt2&gpus=8``.

    The browser's Python has no NumPy, which a few answers need: they are refused with the way out.
    """
    from zeroplan.explore.downloads import report_of  # noqa: PLC0415  most readers save no report

    parts = urlsplit(address)
    what, fields = parts.path.rpartition("/")[2], parse_qsl(parts.query, keep_blank_values=True)
    try:
        if what == "controls":
            return OK, text_of(controls_payload()).decode()
        if what == "report":
            return OK, report_of(dict(once(fields))).decode()
        status, content = answered(what, fields)
    except ZeroplanError as error:
        return REFUSED, text_of({"error": str(error)}).decode()
    except ModuleNotFoundError as error:
        return REFUSED, text_of({"error": f"this answer needs {error.name}, which a browser lacks; {_INSTALLED}"}).decode()
    return status, content.decode()


_INSTALLED = "install zeroplan and run `zeroplan explore`"
