"""The pages use the field's words: what we used to write instead of them has not come back.

Only the prose that people write is read: not code, not output, not the tables that the program writes.
"""

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, name_of, text_of

#: What to write instead, by the words as a regular expression; each was on a page, where a plainer word says the same.
INSTEAD = {
    r"who(m|ever)? asks|whoever|whatever (is|was|are)": "name the actor",
    r"(is|are|was|were) (told|said|asked|taken for)\b": "name the actor: zeroplan assumes, the answer names, you set",
    r"as it is said|says so|is to say\b|say no more": "the answer names, a note says",
    r"stands? (for|in|beside|here|as|with|on its|by itself|apart|behind)\b": "means, replaces, is, is listed",
    r"stood (in|for|beside)\b": "replaced",
    r"(is|are|was|were) (handed|let go|given back|held against|held back to|looked at|worked out|made up)\b": "passes, frees, compares, computes",
    r"hands? (on|over|it on|them on|out|in)\b|handed (on|over)\b": "passes",
    r"lets? go of|let go of": "frees",
    r"(what|that|which|and) (falls?|fell)\b": "is rejected",
    r"holds? (it|them|the \w+|what \w+ \w+) against|held against|holding \w+ against": "compare with",
    r"what stands|where it stands|as it stands|stands? there": "is, contains",
    r"goes? with it\b|go(es)? together\b|went with\b": "you can combine, is freed with",
    r"\bbeside that\b|beside it\b": "with it, together with it",
    r"for good\b|to speak of\b|all the same\b|as ever\b|so to say": "leave it out",
    r"what (comes|came|becomes|became) of": "the result of",
    r"what (surprises|waits|goes|is where is)\b": "name the thing",
    r"in its (place|stead)\b|in whose (place|stead)|in the place of|in place of": "instead",
    r"\bmended\b": "fixed",
    r"\banew\b": "again",
    r"nobody (looked|has looked|took|took|knows|asked)": "we did not",
    r"of which there|than is said|than said": "than zeroplan predicts",
    r"is (a matter|another matter) of": "needs",
    r"set-?ups? that (is|are) (there|read)": "configuration file",
    r"\bquick(er|est)?\b": "fast",
    r"moves? nothing|\btakes? turns\b|in turns\b": "name what happens",
    r"\bunasked\b|\basks? for it\b": "name the actor",
    r"\bever since\b|\bby then\b.*\bby then\b": "leave it out",
}
_NOT_PROSE = re.compile(
    r"^```.*?^```$|<!-- generated: .*?<!-- end -->|<!--.*?-->|`[^`\n]+`|\]\([^)]*\)", re.MULTILINE | re.DOTALL
)


def prose(page: Path) -> str:
    """A page without code, output and the parts that the program writes, on one line."""
    return " ".join(_NOT_PROSE.sub(" ", text_of(page)).split())


def _found(page: Path) -> list[str]:
    text = prose(page)
    hits = [(hit, plain) for words, plain in INSTEAD.items() for hit in re.finditer(rf"\b(?:{words})", text, re.IGNORECASE)]
    return [f"{text[max(0, hit.start() - 30) : hit.end() + 20]!r}: {plain}" for hit, plain in hits]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_uses_plain_words(page: Path):
    assert not _found(page), "\n".join(_found(page))
