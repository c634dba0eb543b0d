"""Runs a block of code of a documentation page: ``from_page.py PAGE WORDS ["OLD => NEW" ...]``.

It is the page's first block with these words, as it stands, but for what the page says to put in another's place.
"""

import re
import sys
import textwrap
from pathlib import Path

page, words, *changes = sys.argv[1:]
blocks = re.findall(r"::(?: python)?\n\n((?: {4}.*\n|\n)+)", Path(page).read_text())
code = textwrap.dedent(next(block for block in blocks if words in block))
for change in changes:
    old, new = change.split(" => ")
    assert old in code, old
    code = code.replace(old, new)
exec(compile(code, "page.py", "exec"), {"__name__": "__main__"})  # noqa: S102  the page's code is what runs
