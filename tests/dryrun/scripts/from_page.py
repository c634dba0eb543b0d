"""Runs a code block of a documentation page: ``from_page.py PAGE WORDS ["OLD => NEW" ...]``.

It is the first block that contains WORDS, with each OLD replaced by NEW, as the page tells its readers to do.
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
