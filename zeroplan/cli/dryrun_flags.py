"""The flags of `zeroplan dryrun`, each a field of ``Flags``, and which of them exclude each other."""

from functools import partial
from typing import Annotated, NamedTuple

import typer

from zeroplan.cli.dryrun_files import Wanted
from zeroplan.cli.dryrun_task import ANY_GPU, Ranks
from zeroplan.cli.flags import TOLERANCE, AsJson, Force, flag, number, switch
from zeroplan.errors import SpecError

_flag, _switch = partial(flag, panel="The run"), partial(switch, panel="The run")
CUDA = "cuda"


class Flags(NamedTuple):
    """The typed values; None for a flag that was not typed. A field has the name of its flag; only ``--json`` is ``as_json``."""

    gpus: Annotated[str | None, _flag("--gpus", "N", "Number of ranks. (default: the launcher's, otherwise 1)")] = None
    gpu: Annotated[
        str | None,
        _flag("--gpu", "NAME", f"The GPU, from the catalogue (`zeroplan gpus`). (default: {ANY_GPU})"),
    ] = None
    gpus_per_node: Annotated[
        str | None, _flag("--gpus-per-node", "N", "Ranks on a node. (default: the GPU's usual server)")
    ] = None
    as_rank: Annotated[str | None, _flag("--as-rank", "R", "The rank to run as. (default: 0)", short="--rank")] = None
    steps: Annotated[str | None, _flag("--steps", "N", "Stop the script after this many optimizer steps. (default: 2)")] = None
    until_end: Annotated[
        bool,
        _switch(
            "--until-end", "Do not stop after --steps: run to the script's end or to --timeout, with evaluation and saving."
        ),
    ] = False
    eager: Annotated[bool, _switch("--eager", "Turn torch.compile off.")] = False
    imbalance: Annotated[
        str | None,
        _flag("--imbalance", "X", "This rank's experts receive X times the even share of tokens. (default: 1)"),
    ] = None
    timeout: Annotated[str | None, _flag("--timeout", "SECONDS", "Stop the script after this time. (default: 600)")] = None
    backend: Annotated[
        str | None,
        _flag(
            "--backend",
            "fake|cuda",
            "cuda: also run the script on this machine's GPUs, and compare the dry run with what they report. (default: fake)",
        ),
    ] = None
    tolerance: Annotated[
        str | None,
        _flag(
            "--tolerance",
            "FRACTION",
            f"With --backend cuda: exit with 3 if the two differ by more than this. (default: {TOLERANCE})",
        ),
    ] = None
    verbose: Annotated[bool, switch("--verbose", "Every module, line, step, collective and note.", short="-v")] = False
    quiet: Annotated[bool, switch("--quiet", "Do not print the script's output.", short="-q")] = False
    show: Annotated[str | None, flag("--show", "FILE", "Print the answer of a saved run; run nothing.")] = None
    save: Annotated[str | None, flag("--save", "FILE", "Save the run with every block of memory; .gz compresses it.")] = None
    profile: Annotated[
        str | None,
        flag(
            "--profile",
            "own|all",
            "With --save: also save a profile of the model for --from-run of estimate, advise and plan. own: for the script's "
            "engine and recomputation; all: for others as well.",
        ),
    ] = None
    against: Annotated[
        str | None,
        flag(
            "--against",
            "FILE",
            "Print what changed since a saved run, instead of the answer. With --backend cuda: the dry run to compare with.",
        ),
    ] = None
    snapshot: Annotated[str | None, flag("--snapshot", "FILE", "Write a memory snapshot for pytorch.org/memory_viz.")] = None
    trace: Annotated[
        str | None, flag("--trace", "FILE", "Write memory by kind, phases and collectives for ui.perfetto.dev.")
    ] = None
    force: Force = False
    unit: Annotated[str | None, flag("--unit", "gib|gb", "Unit of sizes as text. (default: gib)")] = None
    as_json: AsJson = False
    check: Annotated[bool, switch("--check", "Exit with 1 if the script does not fit its GPU.")] = False

    @property
    def ranks(self) -> Ranks:
        """The flags for the rank, the number of ranks, the GPU and the steps."""
        return Ranks(self.gpus, self.gpu, self.gpus_per_node, self.as_rank, self.steps or "2")

    @property
    def wanted(self) -> Wanted:
        """The files to write."""
        return Wanted(self.save, self.snapshot, self.trace, self.force)

    @property
    def on_card(self) -> bool:
        """Whether the script also runs on real GPUs."""
        return self.backend == CUDA

    @property
    def times(self) -> float:
        """The multiple of the even share of tokens that the rank's experts receive."""
        return number(self.imbalance or "1", "--imbalance", 1, 1e6, "a factor from 1 on; write 1.5")

    @property
    def seconds(self) -> float:
        """The script's time limit. [s]"""
        return number(self.timeout or "600", "--timeout", 1, 1e6, "a number of seconds from 1 on; write 600")

    def refuse(self) -> None:
        """Raise SpecError, before the run, for files that cannot be written and for flags without effect."""
        self.wanted.refuse()
        if self.backend not in (None, "fake", CUDA):
            raise SpecError(f"--backend {self.backend!r} is none of fake, cuda")
        self._refuse_profile()
        self._refuse_beside()
        if self.tolerance is not None and not self.on_card:
            raise SpecError(
                f"--tolerance {self.tolerance} is for the comparison with a GPU; add --backend cuda, or leave it out"
            )
        if self.force and not self.wanted.named:
            raise SpecError("--force overwrites a file, but no flag writes one; add --save FILE, or leave --force out")

    def _refuse_profile(self) -> None:
        if self.profile not in (None, "own", "all"):
            raise SpecError(f"--profile {self.profile!r} is none of own, all")
        if self.profile is not None and self.save is None:
            raise SpecError(f"--profile {self.profile} goes into the file of a saved run; add --save FILE")

    def _refuse_beside(self) -> None:
        """Raise SpecError for a flag that another flag makes ineffective."""
        typed = [name for name, value in self._asdict().items() if value not in (None, False)]
        given = ["--" + name.replace("_", "-") for name in typed]
        for rule in self._rules():
            if ignored := next((flag for flag in rule.without_effect if flag in given), None):
                raise SpecError(f"{ignored} has no effect beside {rule.flag}, {rule.why}; leave one of them out")

    def _rules(self) -> tuple["_Rule", ...]:
        """The rules that apply to the given flags."""
        rules = (
            (self.on_card, _ON_CARD),
            (self.on_card and self.against is not None, _ON_CARD_AGAINST),
            (self.show is not None, _SHOW),
            (self.until_end, _UNTIL_END),
            (self.against is not None, _AGAINST),
        )
        return tuple(rule for holds, rule in rules if holds)


class _Rule(NamedTuple):
    """The flags that have no effect beside ``flag``, and why."""

    flag: str
    without_effect: tuple[str, ...]
    why: str


_ON_CARD = _Rule(
    "--backend cuda", ("--show", "--profile", "--check", "--until-end", "--verbose"), "which compares a dry run with a GPU"
)
_ON_CARD_AGAINST = _Rule(
    "--against", ("--save", "--snapshot", "--trace", "--steps", "--imbalance"), "whose file has the dry run already"
)
_SHOW = _Rule(
    "--show",
    (
        "--gpus", "--gpu", "--gpus-per-node", "--as-rank", "--steps", "--until-end", "--eager", "--imbalance", "--timeout",
        "--backend", "--quiet", "--profile",
    ),
    "which runs nothing",
)  # fmt: skip
_UNTIL_END = _Rule("--until-end", ("--steps", "--profile"), "which does not stop the script after its steps")
_AGAINST = _Rule("--against", ("--verbose",), "which prints the changes instead of the answer")


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- COMMAND", help="The script and its arguments, -m module, torchrun …, accelerate launch …, deepspeed …"
    ),
]
