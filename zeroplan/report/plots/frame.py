"""Shared by all pictures: fonts and theme, the caption with the job, legends, writing files."""

import io
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import BinaryIO, Literal

import matplotlib as mpl
import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zeroplan.errors import SpecError
from zeroplan.report.palette import LOOKS, Theme, on
from zeroplan.report.series.parts import Caption
from zeroplan.report.words import made
from zeroplan.whole import unwritten, whole

ENDINGS = ("png", "svg", "pdf")
#: Resolution of figures: small files that stay sharp on screens with doubled pixels.
_DOTS_PER_INCH = 144
SMALL, PLAIN = 7.5, 9.0
_POINTS_PER_INCH, _LINE = 72, 1.4
#: Mean width of a character in running text of DejaVu Sans, as a fraction of the font size.
_SIGN = 0.56
UNIT = "GiB per GPU (1 GiB = 2³⁰ bytes)"

_INKS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
_PAPERS = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
_SETTINGS: dict[str, object] = {
    "font.family": "DejaVu Sans", "font.size": PLAIN, "axes.labelsize": SMALL + 0.5, "legend.fontsize": SMALL,
    "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "legend.frameon": False, "hatch.linewidth": 0.5, "svg.hashsalt": "zeroplan", "pdf.fonttype": 42,
    "svg.fonttype": "none",
}  # fmt: skip
_Corner = Literal["upper left", "lower left"]
LegendEntry = tuple[tuple[Artist, ...], str]


@contextmanager
def style(theme: Theme) -> Iterator[None]:
    """Use matplotlib's own fonts and the theme's colours inside, independent of the user's settings."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.style.use(settings(theme))
        yield


def settings(theme: Theme) -> dict[str, object]:
    """The theme's differences from matplotlib's defaults, for ``matplotlib.style``."""
    return {**dict.fromkeys(_INKS, theme.ink), **dict.fromkeys(_PAPERS, theme.paper), **_SETTINGS}


def framed(figure: Figure, caption: Caption, *, width: float, height: float) -> None:
    """Set a figure's size, its title and the caption below, which gets extra height. [inches]"""
    signs = int(width * _POINTS_PER_INCH / (SMALL * _SIGN))
    lines = [part for line in caption.lines for part in textwrap.wrap(line, signs)]
    below = (len(lines) + 1) * SMALL * _LINE / _POINTS_PER_INCH
    figure.set_size_inches(width, height + below)
    figure.set_layout_engine("constrained", rect=(0, below / (height + below), 1, 1 - below / (height + below)))
    figure.suptitle(caption.title, x=0.012, ha="left", fontweight="bold", fontsize=PLAIN + 1)
    figure.text(
        0.012, 0.3 * SMALL * _LINE / _POINTS_PER_INCH / (height + below), "\n".join(lines),
        fontsize=SMALL, va="bottom", ha="left", linespacing=_LINE - 0.1,
    )  # fmt: skip


def stamped(figure: Figure, theme: Theme) -> None:
    """Write zeroplan's version and the date into the upper right corner, for whoever meets the picture later."""
    figure.text(0.988, 0.985, made(), fontsize=SMALL, va="top", ha="right", color=theme.faint)


def legend(
    axes: Axes,
    entries: Sequence[LegendEntry],
    *,
    loc: _Corner = "upper left",
    at: tuple[float, float] = (1.01, 1.0),
    columns: int = 1,
) -> None:
    """Put a legend beside the axes; it draws several artists of one entry over each other."""
    handles, texts = [artists for artists, _ in entries], [text for _, text in entries]
    axes.legend(handles, texts, loc=loc, bbox_to_anchor=at, borderaxespad=0.0, ncols=columns)


def kind_entries(kinds: Sequence[str], theme: Theme) -> list[LegendEntry]:
    """The legend entries of kinds, the top of the stack first."""
    return [((plain(what, theme), hatched(what)), what) for what in reversed(kinds)]


def plain(what: str, theme: Theme) -> Patch:
    """A patch of a kind's colour, with a border in the background colour."""
    return Patch(facecolor=LOOKS[what].colour, edgecolor=theme.paper, linewidth=0.6)


def hatched(what: str) -> Patch:
    """A patch of a kind's hatch, drawn over its colour."""
    look = LOOKS[what]
    return Patch(facecolor="none", edgecolor=on(look.colour), linewidth=0, hatch=look.hatch)


def saved(figure: Figure, to: Path | BinaryIO, ending: str) -> None:
    """Save the figure without date and version in its metadata, so that equal pictures give equal files."""
    nothing = {"png": {"Software": ""}, "svg": {"Date": None}, "pdf": {"CreationDate": None, "Producer": None, "Creator": None}}
    held = io.BytesIO()
    figure.savefig(held, format=ending, dpi=_DOTS_PER_INCH, metadata=nothing[ending])
    content = _described(held.getvalue(), figure) if ending == "svg" else held.getvalue()
    if isinstance(to, Path):
        to.write_bytes(content)
    else:
        to.write(content)


def _described(svg: bytes, figure: Figure) -> bytes:
    """The SVG with a title and a description for screen readers, and with fonts as wide as DejaVu Sans where that is missing."""
    legends = [found for axes in figure.axes if (found := axes.get_legend()) is not None]
    drawn = [figure.texts, *(axes.texts for axes in figure.axes), *(one.get_texts() for one in legends)]
    lines = [" ".join(text.get_text().split()) for texts in drawn for text in texts]
    words = "; ".join(line for line in lines if any(map(str.isalpha, line)) and line != figure.get_suptitle())
    head = f'version="1.1" role="img">\n <title>{escape(figure.get_suptitle())}</title>\n <desc>{escape(words)}</desc>'
    svg = svg.replace(b'version="1.1">', head.encode(), 1)
    return svg.replace(b"'DejaVu Sans'", b"'DejaVu Sans', Verdana, sans-serif")


def written(figure: Figure, path: Path, *, force: bool) -> None:
    """Write the figure in the format of the path's ending; an interrupted write leaves no file."""
    ending = ending_of(path)
    try:
        with whole(path, force=force) as beside:
            saved(figure, beside, ending)
    except OSError as error:
        raise unwritten(error) from None


def ending_of(path: Path) -> str:
    """The format by a path's ending. Raises SpecError for other endings than png, svg and pdf."""
    ending = path.suffix.removeprefix(".").lower()
    if ending not in ENDINGS:
        raise SpecError(f"{path.name!r} does not end in .png, .svg or .pdf; the ending chooses the format")
    return ending


_NO_WINDOWS = "matplotlib finds nothing to draw windows with; write a file with -o FILE.png, or use --text"


def blank() -> Figure:
    """A new figure without a window."""
    return Figure()


def shown(draw: Callable[[Figure], None]) -> None:
    """Draw in a window, and wait until the user closes it."""
    from matplotlib import pyplot as plt  # noqa: PLC0415  which chooses what draws windows

    try:
        figure = plt.figure()
    except ImportError:  # the user's matplotlib backend is not installed
        raise SpecError(_NO_WINDOWS) from None
    if getattr(type(figure.canvas), "required_interactive_framework", None) is None:
        raise SpecError(_NO_WINDOWS)
    draw(figure)
    plt.show()
