"""Defines the colour, hatch and sign of each kind of memory, stage and engine for every picture.

Colours are Okabe and Ito's, which colour-blind readers can distinguish (Okabe and Ito 2008, Color Universal Design), and others
of the same hue for related things. Any two kinds differ in lightness or in hatch, so they also differ in grey. Plain data, which
the browser's page uses too.
"""

from typing import Literal, NamedTuple

from zeroplan.ledger import NOT_TOLD_APART, Kind

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"

#: GPU memory outside the allocator. Only a band is known, so it is no kind of the ledger.
OUTSIDE = "context and communicators"


class Look(NamedTuple):
    """A kind's colour, its hatch in pictures, its character in a terminal, and a letter for plain terminals."""

    colour: str
    hatch: str
    sign: str
    letter: str


#: Kinds from the bottom of a stack to its top: constant memory first.
LOOKS: dict[str, Look] = {
    Kind.PARAMETERS.value: Look(BLUE, "", "█", "P"),
    Kind.OPTIMIZER_STATE.value: Look(GREEN, "..", "▓", "O"),
    Kind.GRADIENTS.value: Look(VERMILLION, "", "▒", "G"),
    Kind.WEIGHT_CASTS.value: Look("#A6C8E4", "\\\\", "▤", "W"),
    Kind.UNSHARDED_PARAMETERS.value: Look(SKY, "//", "▥", "U"),
    Kind.GATHER.value: Look("#B5DDF5", "--", "▦", "A"),
    Kind.UNSHARDED_GRADIENTS.value: Look(ORANGE, "\\\\", "▧", "V"),
    Kind.REDUCE.value: Look("#F6D28B", "//", "▨", "R"),
    Kind.ACTIVATIONS.value: Look(PURPLE, "", "░", "S"),
    Kind.ACTIVATION_GRADIENTS.value: Look("#A8528A", "//", "▩", "B"),
    Kind.LOGITS.value: Look(YELLOW, "", "■", "L"),
    Kind.TEMPORARY.value: Look("#9A9A9A", "xx", "▪", "T"),
    Kind.OPTIMIZER_TEMPORARY.value: Look("#7FCBB3", "", "▣", "Q"),
    Kind.WORKSPACE.value: Look("#5E5E5E", "++", "◆", "C"),
    OUTSIDE: Look("#D9D9D9", "..", "□", "X"),
    NOT_TOLD_APART: Look("#F2F2F2", "//", "◇", "N"),
}
ORDER = tuple(LOOKS)


class LineLook(NamedTuple):
    """A line's colour, marker and dashes."""

    colour: str
    mark: str
    dashes: Literal["-", "--", "-.", ":"]


STAGES: dict[int, LineLook] = {
    0: LineLook(VERMILLION, "o", "-"),
    1: LineLook(ORANGE, "s", "--"),
    2: LineLook(SKY, "^", "-."),
    3: LineLook(BLUE, "D", "-"),
}
ENGINES: dict[str, LineLook] = {
    "paper": LineLook(PURPLE, "v", ":"),
    "ddp": LineLook(GREEN, "o", "-"),
    "fsdp1": LineLook(SKY, "D", "-."),
    "fsdp2": LineLook(BLUE, "s", "--"),
    "deepspeed": LineLook(VERMILLION, "^", "-."),
    "megatron": LineLook(ORANGE, "P", "--"),
}


class Theme(NamedTuple):
    """Paper or screen: the colours of background, text and lines."""

    paper: str
    ink: str
    faint: str
    warn: str
    """The colour of a limit, and of values beyond it."""


THEMES = {
    "light": Theme("#FFFFFF", "#1A1A1A", "#8C8C8C", "#B00020"),
    "dark": Theme("#16181D", "#EDEDED", "#8A8F98", "#FF7A8A"),
}


def lightness(colour: str) -> float:
    """Return the lightness of a colour in grey, from 0 to 1 (the luma of Rec. 601, as in greyscale printing).

    >>> lightness("#000000"), lightness("#FFFFFF")
    (0.0, 1.0)
    """
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return round(0.299 * red + 0.587 * green + 0.114 * blue, 6)


#: Text is white on darker colours, and dark grey on lighter ones.
_DARK = 0.55


def on(colour: str) -> str:
    """Return the colour of a legible hatch or number on a colour.

    >>> on(BLUE), on(YELLOW)
    ('#FFFFFF', '#333333')
    """
    return "#FFFFFF" if lightness(colour) < _DARK else "#333333"
