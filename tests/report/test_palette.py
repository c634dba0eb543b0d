"""All pictures use one palette: everything has a style, and no two kinds look alike in grey."""

import re
from itertools import combinations

import pytest

from zeroplan.ledger import NOT_TOLD_APART, Kind
from zeroplan.report.palette import ENGINES, LOOKS, OUTSIDE, STAGES, THEMES, lightness
from zeroplan.spec.job import ENGINE_STAGES

_APART = 0.1
"""Of lightness: a step that greyscale printing keeps."""


def test_every_kind_stage_and_engine_has_a_look():
    assert LOOKS.keys() == {*(kind.value for kind in Kind), OUTSIDE, NOT_TOLD_APART}
    assert STAGES.keys() == {0, 1, 2, 3}
    assert ENGINES.keys() == ENGINE_STAGES.keys()


def test_any_two_kinds_differ_in_grey_and_in_a_terminal_without_colours():
    for (one, a), (other, b) in combinations(LOOKS.items(), 2):
        assert a.hatch != b.hatch or abs(lightness(a.colour) - lightness(b.colour)) >= _APART, (one, other)
        assert a.colour != b.colour, (one, other)
        assert a.sign != b.sign, (one, other)
        assert a.letter != b.letter, (one, other)


@pytest.mark.parametrize("looks", [STAGES, ENGINES])
def test_lines_differ_by_more_than_colour(looks: dict[object, tuple[str, ...]]):
    assert len({(look.mark, look.dashes) for look in looks.values()}) == len(looks)
    assert len({look.colour for look in looks.values()}) == len(looks)


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_ink_and_warnings_stand_out_from_paper(theme: tuple[str, ...]):
    """WCAG 2.1, 1.4.3: contrast of text, at least 4.5 to 1."""
    for ink in (theme.ink, theme.warn):
        one, other = sorted((_luminance(ink), _luminance(theme.paper)), reverse=True)
        assert (one + 0.05) / (other + 0.05) >= 4.5


def _luminance(colour: str) -> float:
    assert re.fullmatch("#[0-9A-F]{6}", colour)
    linear = []
    for at in (1, 3, 5):
        share = int(colour[at : at + 2], 16) / 255
        linear.append(share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
