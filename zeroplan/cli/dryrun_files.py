"""The files that `zeroplan dryrun` writes beside its answer, and the saved runs that it reads."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.cli import say
from zeroplan.errors import SpecError
from zeroplan.whole import refuse_target

if TYPE_CHECKING:
    from zeroplan.script_trace import SavedRun


class Wanted(NamedTuple):
    """The files to write for a run; None for a file that was not requested."""

    save: str | None
    snapshot: str | None
    trace: str | None
    force: bool

    @property
    def named(self) -> dict[str, str]:
        """The requested files, by flag."""
        flags = {"--save": self.save, "--snapshot": self.snapshot, "--trace": self.trace}
        return {flag: path for flag, path in flags.items() if path is not None}

    def refuse(self) -> None:
        """Raise SpecError, before the run, for files that could not be written."""
        for flag, path in self.named.items():
            refuse_target(Path(path), flag, force=self.force)
        if len({Path(path).absolute() for path in self.named.values()}) < len(self.named):
            raise SpecError(f"{' and '.join(self.named)} name one file; name different ones")

    def write(self, saved: "SavedRun") -> None:
        """Write the requested files, each completely or not at all, and print their paths."""
        from zeroplan.saved_runs.files import save  # noqa: PLC0415  start-up is part of every command's time
        from zeroplan.saved_runs.perfetto import save_trace  # noqa: PLC0415
        from zeroplan.saved_runs.snapshot import save_snapshot  # noqa: PLC0415

        writers = {"--save": save, "--snapshot": save_snapshot, "--trace": save_trace}
        for flag, path in self.named.items():
            writers[flag](saved, Path(path), force=self.force)
            say(f"wrote {path}")


def show_saved(path: str, command: list[str] | None) -> "SavedRun":
    """Return the saved run of ``--show``; raises SpecError if a command is given as well."""
    if command:
        raise SpecError(f"--show {path!r} runs nothing; leave out the script behind --")
    return saved_at(path)


def saved_at(path: str) -> "SavedRun":
    """Return the saved run at a path; raises SpecError for any other file."""
    from zeroplan.saved_runs.files import read_saved  # noqa: PLC0415  see above

    return read_saved(Path(path))


def printable(text: str) -> str:
    """Return the text of an untrusted file for a terminal: invisible characters except line breaks are escaped."""
    return "".join(
        sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode("ascii") for sign in text
    )
