"""Docstrings as the pages show them: examples as blocks of code, roles of Sphinx as plain code."""

import re

import griffe

_EXAMPLE = re.compile(r"(?:^[ ]*>>>.*\n?(?:^[ ]*\S.*\n?)*)", re.MULTILINE)
_ROLE = re.compile(r":(?:class|mod|func|attr|meth):`~?([^`]+)`")


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite this object's."""
        if obj.docstring is not None:
            obj.docstring.value = _fenced(_ROLE.sub(r"`\1`", obj.docstring.value))


def _fenced(text: str) -> str:
    return _EXAMPLE.sub(lambda found: f"```python\n{found[0].rstrip()}\n```\n", text)
