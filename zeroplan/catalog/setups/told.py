"""Reads the settings of a job from a configuration file, key by key, and combines them with the flags."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, NamedTuple

from zeroplan.catalog.model import WAYS_TO_NAME
from zeroplan.catalog.text import shown
from zeroplan.errors import SpecError

Kind = Literal[
    "deepspeed", "accelerate", "trainer", "torchtitan", "llama-factory", "axolotl", "verl", "ms-swift", "openrlhf", "torchtune",
    "automodel", "megatron", "nanotron", "lightning",
]  # fmt: skip


class Told(NamedTuple):
    """A value and the key it stands under; ``filled`` where the file leaves it to a default, or to the training script.

    ``also`` are other values of a flag that say the same, only more exactly; ``note`` is for where the value is taken.
    """

    key: str
    value: object
    filled: bool = False
    also: tuple[object, ...] = ()
    note: str = ""


class DeepSpeedPart(NamedTuple):
    """A DeepSpeed configuration that a file holds or names."""

    data: Mapping[str, object]
    where: str


class OwnModules(NamedTuple):
    """The modules that the file's program trains, if they are modelled, and the note if others are counted instead."""

    name: Literal["torchtitan"]
    instead: tuple[str, ...]


class Setup(NamedTuple):
    """What one file says: flags by their name, engines' options as ``fsdp2.reduce_dtype``, and what is to be known of it.

    ``asks`` holds what the file says in a way that is not modelled, by the flag that would say what is answered instead.
    """

    kind: Kind
    flags: Mapping[str, Told] = {}
    options: Mapping[str, Told] = {}
    asks: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
    deepspeed: DeepSpeedPart | None = None
    own: OwnModules | None = None
    own_units: str = ""
    """The program that shards embedding and head as FSDP2 units of their own, if the file's does."""
    matters: Mapping[str, str] = {}
    """Keys that change memory in a way that is not modelled, and the note that names each."""
    saves: frozenset[str] = frozenset()
    """Those among them that can only save memory."""
    head_rows: int | None = None
    """Outputs of the head, where the file trains a model that classifies."""
    pairs: bool = False
    """Its micro-batch is in pairs, each of which is two sequences here."""
    used: tuple[str, ...] = ()
    """Its keys that say something of the job."""
    loop: Mapping[str, object] = {}
    """The fine-tuning loop whose training step this is: its ``workflow``, and options by their names in zeroplan.workflow."""


class Taken(NamedTuple):
    """What a request gets from a file: the settings in it, and defaults that apply if no flag is given."""

    flags: dict[str, object]
    filled: dict[str, object]
    notes: tuple[str, ...]


#: A default of one of these makes no sense beside a choice of the other.
_TOGETHER = ("engine", "stage")


def taken(setup: Setup, said: Mapping[str, object], where: str) -> Taken:
    """What the file adds to the flags; raises SpecError if both contradict each other, or if a flag has to decide."""
    notes = [*setup.notes, *_asked(setup, said, where)]
    flags: dict[str, object] = {}
    filled: dict[str, object] = {}
    chosen = any(name in said for name in _TOGETHER)
    for name, told in setup.flags.items():
        if name in WAYS_TO_NAME:
            notes += _model(name, told, said, flags)
        elif name not in said:
            if not (told.filled and name in _TOGETHER and chosen):
                (filled if told.filled else flags)[name] = told.value
                notes += [told.note] if told.note else []
        elif not told.filled and said[name] not in (told.value, *told.also):
            raise SpecError(_contradiction(f"--{name.replace('_', '-')} {said[name]}", where, told))
        elif name == "engine" and not told.filled and said[name] != told.value:
            notes.append(f"{told.key} makes the engine {told.value}; the answer is for --engine {said[name]} instead")
    return Taken(flags, filled, tuple(notes))


def _asked(setup: Setup, said: Mapping[str, object], where: str) -> Iterator[str]:
    for name, why in setup.asks.items():
        if name not in said:
            raise SpecError(f"{where}: {why}")
        yield f"{why.partition(';')[0]}: the answer is for --{name.replace('_', '-')} {said[name]} instead"


def _model(name: str, told: Told, said: Mapping[str, object], flags: dict[str, object]) -> Iterator[str]:
    """A model beside the file takes the place of the file's."""
    mine = next((key for key in WAYS_TO_NAME if key in said), None)
    if mine is None:
        flags[name] = told.value
        yield from [told.note] if told.note else []
    elif said[mine] != told.value:
        yield f"{told.key} is {shown(told.value)}, but --{mine} replaces it"


def _contradiction(mine: str, where: str, told: Told) -> str:
    value = str(told.value).lower() if isinstance(told.value, bool) else told.value
    return f"{mine} contradicts {where}, where {told.key} makes it {value}; leave one of them out"


def own_tensor_parallelism(key: str, ways: int) -> str:
    """What asks for a flag where transformers splits a model by its own plan."""
    return (
        f"{key} is {ways}, transformers' own tensor parallelism, which is not modelled; --tensor-parallel {ways} uses "
        "torchtitan's plan instead, with sequence parallelism"
    )


def option_taken(name: str, told: Told, mine: object, default: object, where: str, *, chosen: bool) -> object:
    """The value of an engine's option: the file's, unless a flag or `--set` gives another."""
    if mine == default and not chosen:
        return told.value
    if mine != told.value and not told.filled:
        raise SpecError(_contradiction(f"--set {name}={mine}", where, told))
    return mine


#: How a switch is off, in small letters.
_OFF = ("false", "none", "null", "no", "0", "0.0", "disabled", "", "[]", "{}")
#: What a key does to memory that is not modelled, and what the answer is then.
_EFFECTS = {
    "saves": "may save memory, which is not counted: the answer is the most it takes",
    "adds": "takes memory that is not counted: the answer is too low by that",
    "either": "changes memory in a way that is not modelled: the answer is without it, and may be too low",
}


#: Keys that other programs' own code knows, by their last word: a line for each kind (tests/catalog/setups/known_keys.py).
KNOWN_KEYS = Path(__file__).with_name("known_keys.txt")


def known_keys(kind: Kind) -> frozenset[str]:
    """Return the last words of the keys that a program knows; none of a program whose reader knows all that it has."""
    lines = (line.partition(": ") for line in KNOWN_KEYS.read_text(encoding="utf-8").splitlines())
    return next((frozenset(words.split()) for name, _, words in lines if name == kind), frozenset())


class Table:
    """One table of a file: values by key, with their types checked, and which keys no reader has used."""

    def __init__(self, data: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.data, self.where, self.prefix = data, where, prefix
        self.read: set[str] = set()
        self.matters: dict[str, str] = {}
        """Keys that change memory in a way that is not modelled, and a note on each."""
        self.saves: set[str] = set()
        """Those among them that can only save memory."""
        self.said: Mapping[str, object] = data
        """The file's own keys."""
        self.left_out: frozenset[str] = frozenset()
        """Keys whose value is the program's default, not the file's."""

    def name(self, key: str) -> str:
        """The key, preceded by the names of its tables."""
        return f"{self.prefix}{key}"

    def get(self, key: str) -> object:
        """The value, or None; a key with null counts as left out."""
        self.read.add(key)
        return self.data.get(key)

    def wrong(self, key: str, wanted: str) -> SpecError:
        """The error for a value that is not what is wanted."""
        return SpecError(f"{self.where}: {self.name(key)}={shown(self.data.get(key))} is not {wanted}")

    def refused(self, key: str, way_out: str = "leave it out") -> SpecError:
        """The error for what changes memory and has no words in a job."""
        value = shown(self.data.get(key))
        return SpecError(f"{self.where}: {self.name(key)}={value} changes memory in a way that is not modelled; {way_out}")

    def text(self, key: str) -> str | None:
        """A text, or None."""
        value = self.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(key, "a text")

    def switch(self, key: str) -> bool | None:
        """True or false, written as such or as a text; None where it is left out."""
        value = self.get(key)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(key, "true or false")

    def count(self, key: str, *, least: int = 1) -> int | None:
        """A whole number from ``least`` on, also as a text; None where it is left out."""
        value = self.get(key)
        if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit() and len(value) < 16:
            value = int(value)
        if isinstance(value, float) and value.is_integer() and abs(value) <= 10**15:
            value = int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 10**15:
            raise self.wrong(key, f"a whole number from {least} to 1e15")
        return value

    def table(self, key: str) -> "Table":
        """A table inside this one; an empty one where it is left out."""
        value = self.get(key)
        if value is None:
            return Table({}, self.where, f"{self.name(key)}.")
        if not isinstance(value, dict):
            raise self.wrong(key, "a table of keys and values")
        return Table(value, self.where, f"{self.name(key)}.")

    def leave(self, keys: Iterable[str]) -> None:
        """Keys that change no memory of a training step."""
        self.read.update(keys)

    def refuse(self, keys: Mapping[str, tuple[object, ...]]) -> None:
        """Refuse keys that change memory, unless their value is one that leaves it as it is."""
        for key, harmless in keys.items():
            value = self.get(key)
            if value is None or value in (False, "", [], {}) or value in harmless:
                continue
            raise self.refused(key)

    def like(self, patterns: str) -> list[str]:
        """Keys that one of the patterns describes, in the file's order; they count as read."""
        found = [key for key in self.data if any(fnmatchcase(key, one) for one in patterns.split())]
        self.read.update(found)
        return found

    def unmodelled(self, *, harmless: Mapping[str, tuple[object, ...]] = {}, **effects: str) -> None:
        """Note keys that change memory and are not modelled, by patterns: those that save it, add to it, or do either.

        ``harmless`` has values of keys that change none.
        """
        for effect, patterns in effects.items():
            for key in self.like(patterns):
                value = self.data[key]
                if value is not None and str(value).lower() not in _OFF and value not in harmless.get(key, ()):
                    self.matters[key] = f"{self.name(key)}={shown(value)} {_EFFECTS[effect]}"
                    self.saves.update([key] * (effect == "saves"))

    def unknown(self, known: Collection[str] = ()) -> Iterator[str]:
        """A note on every key that no reader used, that may change memory, and that the program does not know itself."""
        for key in sorted(self.data.keys() - self.read, key=str):
            if key not in known:
                yield f"{shown(self.name(str(key)))} is not known here and left out"


class TranslatedTable(Table):
    """A program's own keys in the words of TrainingArguments, with its own in errors and notes.

    ``instead`` has its keys by those of TrainingArguments, and ``made`` the values under the latter.
    """

    def __init__(self, theirs: Table, instead: Mapping[str, str], made: Mapping[str, object]) -> None:
        kept = {key: value for key, value in theirs.data.items() if key not in instead.values()}
        super().__init__({**kept, **made}, theirs.where)
        self.instead, self.read, self.matters, self.saves = instead, theirs.read, theirs.matters, theirs.saves
        self.said = theirs.said
        self.left_out = frozenset(key for key, own in instead.items() if theirs.data.get(own) is None)

    def name(self, key: str) -> str:
        """The program's own key."""
        return self.instead.get(key, key)


def _flat(data: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", None if value in ("", "null", "None", "???") else value


class FlatTable(Table):
    """All keys of a file, each with the tables it is in before it: ``trainer.nnodes``. A value ``${key}`` is that key's."""

    def __init__(self, data: Mapping[str, object], where: str) -> None:
        super().__init__(dict(_flat(data)), where)
        self.leave(("launched_gpus",))
        for key, value in self.data.items():
            if isinstance(value, str) and value.startswith("${") and value.endswith("}"):
                other = self.data.get(value[2:-1])
                self.data = {**self.data, key: None if isinstance(other, str) and other.startswith("${") else other}

    def last(self, key: str) -> str:
        """The last word of a dotted name, such as a class's; empty where it is left out."""
        return str(self.get(key) or "").rpartition(".")[2]

    def unknown(self, known: Collection[str] = ()) -> Iterator[str]:
        """One note on all keys that no reader used, that are not null, and that the program does not know itself."""
        unread = [key for key, value in self.data.items() if key not in self.read and value is not None]
        lasts = {key: key.rpartition(".")[2] for key in unread}
        left = [
            shown(key) for key, last in lasts.items() if last[:1] != "_" and not {last, last.removeprefix("no_")} & set(known)
        ]
        if left:
            yield f"{', '.join(left)} {'is' if len(left) == 1 else 'are'} not known here and left out"


def number_of(value: object, otherwise: float) -> float:
    """Return a number, also from a text; of anything else ``otherwise``."""
    try:
        return otherwise if value is None else float(str(value))
    except ValueError:
        return otherwise


def ends_counted_as_one(program: str) -> str:
    """The note on a job that does not follow its program's FSDP2 units."""
    return (
        f"{program} shards the embedding, and the last norm with the head, as units of their own; they are counted as one unit, "
        "gathered from the forward to the end of the backward, which is an upper bound"
    )


def ends_counted_apart(program: str) -> str:
    """The note on a job that follows its program's FSDP2 units."""
    return (
        f"the embedding, and the last norm with the head, are FSDP2 units of their own, as {program} shards them; "
        "--set fsdp2.ends_apart=false counts one unit"
    )


NO_GPUS = "the file does not say how many GPUs: zeroplan counts {}, as its degrees need; add --gpus N"
COMPILED = (
    "the step is counted without torch.compile; in the runs that were compared a compiled one took no more "
    "(`zeroplan dryrun` follows the compiler)"
)
ULYSSES = "Ulysses' ranks split a sequence outside of attention and its heads inside: a rank's share of its tokens is counted"
LIGER = ("rope", "liger-rms-norm", "liger-swiglu")
_LIGER = "operators other than RMSNorm, rotary positions and SiLU's product are counted as without Liger, which takes no less"
_LOOP = (
    "{} makes the training step a part of a loop: `zeroplan check` judges all of its phases, `zeroplan workflow {} --from FILE` "
    "lists them"
)
_CUT = "which takes as much, and a piece of the logits beside it"


class Reading:
    """One file, read once, and what was read so far. ``folder`` is where to look for files that it names."""

    def __init__(self, table: Table, folder: Path = Path()) -> None:
        self.table, self.folder = table, folder
        self.flags: dict[str, Told] = {}
        self.options: dict[str, Told] = {}
        self.asks: dict[str, str] = {}
        self.notes: list[str] = []
        self.deepspeed: DeepSpeedPart | None = None
        self.own_units = ""
        self.head_rows: int | None = None
        self.pairs = False
        self.loop: dict[str, object] = {}

    def tell(
        self, flag: str, key: str, value: object, *, filled: bool = False, also: tuple[object, ...] = (), note: str = ""
    ) -> None:  # fmt: skip
        """Say a flag."""
        self.flags[flag] = Told(self.table.name(key), value, filled or key in self.table.left_out, also, note)

    def tell_offload(self, key: str) -> None:
        """Say that parameters, gradients and the optimizer are in host memory."""
        for name in ("offload_optimizer", "offload_param"):
            self.tell(name, key, "cpu")

    def number(self, flag: str, *keys: str, default: int | None = None, times: int = 1) -> int | None:
        """Say a count under the first of these keys that the file has, or the program's default; returns it."""
        key = next((one for one in keys if self.table.data.get(one) is not None), keys[0])
        said = self.table.count(key)
        value = default if said is None else said
        if value is not None:
            self.tell(flag, key, value * times, filled=said is None)
        return value

    def tell_pairs(self) -> None:
        """Say twice as many sequences: a chosen and a rejected one in a pair."""
        self.pairs = True
        size = self.flags["micro_batch"]
        self.flags["micro_batch"] = size._replace(value=2 * int(str(size.value)))

    def tell_liger(self, *parts: str, key: str, loss: bool) -> None:
        """Say the parts that run in Liger's kernels, as RecipeSpec names them, and whether head and loss do."""
        if parts:
            self.tell("fused_kernels", key, ",".join(parts), note=f"{self.table.name(key)}: {_LIGER}")
        if loss:
            self.tell("loss", key, "fused", filled=True)

    def tell_loop(self, key: str, workflow: str, *, alone: bool = False, **options: object) -> None:
        """Say the loop that the training step is a part of; an option that is None is its trainer's default.

        ``alone``: the file's training step is known, the phases beside it are not judged.
        """
        said = {name: one for name, one in options.items() if one is not None}
        self.loop = {"workflow": workflow, **said, **({"alone": True} if alone else {})}
        if not alone:
            self.notes.append(_LOOP.format(self.table.name(key), workflow))

    def tell_log_probs(self, key: str, *, how: str = "tiles", note: str = "") -> None:
        """Say that the trainer's loss is made of log-probabilities; ``how``: :data:`~zeroplan.spec.recipe.LogProbs`."""
        self.tell("loss", key, "log-probs", filled=True, note=note)
        self.tell("log_probs", key, how, filled=True)

    def tell_compiled(self, table: Table, key: str) -> None:
        """Say that the step is compiled, which is counted without a compiler."""
        self.table.matters[table.name(key)] = f"{table.name(key)}={shown(table.data[key])}: {COMPILED}"
        self.table.saves.add(table.name(key))

    def tell_cut_loss(self, key: str) -> None:
        """Say that logits are never whole (cut_cross_entropy 25.1, cce.py).

        It keeps one number of each token and makes both gradients in the backward, which Liger's holds from the forward on.
        """
        self.tell("loss", key, "fused", filled=True, note=f"{self.table.name(key)} is counted as Liger's fused loss, {_CUT}")

    def degree(self, flag: str, *keys: str) -> int:
        """Say a degree of parallelism above 1; returns it. 0 and -1 are 1 to some programs."""
        key = next((one for one in keys if self.table.data.get(one) is not None), keys[0])
        said = self.table.get(key)
        value = 1 if said in (None, 0, -1, "0", "-1", "none") else self.table.count(key) or 1
        if value > 1:
            self.tell(flag, key, value)
        return value

    def tell_steps(self, key: str, total: int | None, each: int) -> None:
        """Say the micro-batches of a step: the whole batch over the sequences that all ranks take at once."""
        if total is not None:
            self.tell("grad_accum", key, max(1, -(-total // each)), filled=total % each != 0)

    def tell_model(self, key: str, named: str) -> None:
        """Say the model: a folder here with a config.json, or a name; of another path its last part."""
        folder = next((path for path in (Path(named), self.folder / named) if _holds_a_config(path)), None)
        if folder is not None:
            self.tell("config", key, str(folder))
            return
        last = named.rstrip("/").rpartition("/")[2]
        is_path = named.startswith(("/", ".", "~")) or named.count("/") > 1
        note = f"{self.table.name(key)} is a path without a config.json here, and its last part is taken for the model's name"
        self.tell("model", key, last if is_path else named, note=note if is_path else "")

    def unmodelled(self, *, saves: str = "", adds: str = "", either: str = "") -> None:
        """Note the keys that change memory and are not modelled; see Table's."""
        self.table.unmodelled(saves=saves, adds=adds, either=either)

    def _says(self, key: str) -> bool:
        """Whether the file has this key, with the tables that it is in."""
        data: object = self.table.said
        if key in self.table.data or key in self.table.said:
            return True
        for part in key.split("."):
            data = data.get(part) if isinstance(data, dict) else None
        return data is not None

    def setup(self, kind: Kind) -> Setup:
        """Everything that was read, and a note on every key that no reader used."""
        matters = self.table.matters
        notes = (*matters.values(), *self.notes, *self.table.unknown(known_keys(kind)))
        return Setup(
            kind, self.flags, self.options, self.asks, notes, self.deepspeed, own_units=self.own_units, matters=matters,
            saves=frozenset(self.table.saves), head_rows=self.head_rows, pairs=self.pairs, loop=self.loop,
            used=tuple(dict.fromkeys(one.key for one in (*self.flags.values(), *self.options.values()) if self._says(one.key))),
        )  # fmt: skip


def _holds_a_config(path: Path) -> bool:
    try:
        return (path / "config.json").is_file()
    except (OSError, ValueError):
        return False
