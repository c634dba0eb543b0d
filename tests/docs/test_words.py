"""The pages use the field's words, and none of the private words that we used to write.

The test reads only prose that people write: no code, no output, and no tables that the program writes.
"""

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, name_of, text_of

#: Private words as regular expressions, and what to write instead. Each was on a page where a plain word means the same.
INSTEAD = {
    r"whoever|who asks|who else|(is|are|was|were) asked": "name the actor: you set, the operator allocates",
    r"(is|are|was|were|be) (told|said|taken (for|to|as)|answered)": "zeroplan assumes, the answer names, a note explains",
    r"and says so|which says so|so to say|what (it|that) says|than (is )?said": "the answer names, a note points out",
    r"(stands?|stood) (for|in|beside|here|as|with|on its|by itself|apart|behind|there)|what (stands|stood)": "means, replaces, is",
    r"(is|are|was|were|been) (held against|handed|let go|given back)|h[eo]lds? \w+ against|held against": "compare, pass, free",
    r"hands? (on|over|it on|them on)|handed (on|over)|lets? go of": "passes, frees",
    r"(is|are|was|were) (looked at|worked out|made up|put in order)": "we checked, computes, invents, sorts",
    r"(what|that|which|and) (falls?|fell)\b": "is rejected",
    r"goes? together|(goes?|went) with it|goes? backward|goes? round": "you can combine, the backward of a block runs, travels",
    r"beside that\b|for good\b|to speak of|all the same\b|as ever\b|but for\b": "leave it out, or: except for",
    r"what (comes|came|becomes|became) of": "the result",
    r"in (its|whose|their) (place|stead)|in (the )?place of": "instead, replaces",
    r"anew|mended|unasked|quick(er|est)?|so many": "again, fixed, without a flag, fast, that many",
    r"nobody (looked|has looked|took|knows|asked)|by us\b": "we did not",
    r"set-ups?|page to play|is it true": "configuration file, page with sliders",
    r"takes? turns|in turns|moves? nothing": "alternate, sends nothing",
    r"loss in chunks|closed form|the paper's account": "chunked loss, closed formula, the paper counts",
    r"(is|are) of (the|a|that|this)\b": "is for, shows",
}
_NOT_PROSE = re.compile(
    r"^```.*?^```$|^<!-- generated: .*?<!-- end -->|<!--.*?-->|`[^`\n]+`|\]\([^)]*\)", re.MULTILINE | re.DOTALL
)


def prose(text: str) -> str:
    """Return a page on one line, without code, output and generated tables."""
    return " ".join(_NOT_PROSE.sub(" ", text).split())


def _found(text: str) -> list[str]:
    hits = [(hit, plain) for words, plain in INSTEAD.items() for hit in re.finditer(rf"\b(?:{words})\b", text, re.IGNORECASE)]
    return [f"...{text[max(0, hit.start() - 30) : hit.end() + 20]}... Write instead: {plain}" for hit, plain in hits]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_uses_plain_words(page: Path):
    found = _found(prose(text_of(page)))
    assert not found, "\n".join(found)


def test_private_words_are_found_only_in_prose():
    assert len(_found(prose("Whoever asks is told what stands in it.\n\n```text\nwhat fell\n```\n`held against`"))) == 3
