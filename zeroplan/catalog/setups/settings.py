"""Reads the settings of a job from a configuration file, key by key, and combines them with the flags."""

import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.catalog.model import WAYS_TO_NAME
from zeroplan.catalog.setups.keys import keys_of
from zeroplan.catalog.setups.setup import DeepSpeedPart, Kind, Setting, Setup
from zeroplan.catalog.text import shown
from zeroplan.errors import SpecError, ZeroplanError

if TYPE_CHECKING:
    from zeroplan.spec.model import ModelSpec

#: Programs whose collators pad the sequences of a batch to the longest, unless a key joins them.
_PADS: tuple[Kind, ...] = ("trainer", "llama-factory", "axolotl", "ms-swift", "openrlhf")
_JOINS = ("packing", "neat_packing", "sample_packing", "padding_free", "ds.packing_samples")


class RequestSettings(NamedTuple):
    """A file's settings for a request: ``flags`` set in the file, and ``filled`` defaults."""

    flags: dict[str, object]
    filled: dict[str, object]
    notes: tuple[str, ...]


#: Flags that belong together: if the user sets one, the file's default of the other is dropped.
_TOGETHER = ("engine", "stage")


def request_settings(setup: Setup, by_user: Mapping[str, object], where: str) -> RequestSettings:
    """Return the settings that the file adds to the user's flags; raises SpecError if both contradict, or a flag must decide."""
    notes = [*setup.notes, *_answered_asks(setup, by_user, where)]
    flags: dict[str, object] = {}
    filled: dict[str, object] = {}
    chosen = any(name in by_user for name in _TOGETHER)
    for name, setting in setup.flags.items():
        if name in WAYS_TO_NAME:
            notes += _model(name, setting, by_user, flags)
        elif name not in by_user:
            if not (setting.filled and name in _TOGETHER and chosen):
                (filled if setting.filled else flags)[name] = setting.value
                notes += [setting.note] if setting.note else []
        elif not setting.filled and by_user[name] not in (setting.value, *setting.also):
            raise SpecError(_contradiction(f"--{name.replace('_', '-')} {by_user[name]}", where, setting))
        elif name == "engine" and not setting.filled and by_user[name] != setting.value:
            notes.append(f"{setting.key} makes the engine {setting.value}; the answer is for --engine {by_user[name]} instead")
    return RequestSettings(flags, filled, tuple(notes))


def _answered_asks(setup: Setup, by_user: Mapping[str, object], where: str) -> Iterator[str]:
    for name, why in setup.asks.items():
        if name not in by_user:
            raise SpecError(f"{where}: {why}")
        yield f"{why.partition(';')[0]}: the answer is for --{name.replace('_', '-')} {by_user[name]} instead"


def _model(name: str, setting: Setting, by_user: Mapping[str, object], flags: dict[str, object]) -> Iterator[str]:
    """Take the file's model unless the user's flags name one, and yield the notes."""
    mine = next((key for key in WAYS_TO_NAME if key in by_user), None)
    if mine is None:
        flags[name] = setting.value
        yield from [setting.note] if setting.note else []
    elif by_user[mine] != setting.value:
        yield f"{setting.key} is {shown(setting.value)}, but --{mine} replaces it"


def _contradiction(mine: str, where: str, setting: Setting) -> str:
    value = str(setting.value).lower() if isinstance(setting.value, bool) else setting.value
    return f"{mine} contradicts {where}, where {setting.key} makes it {value}; leave one of them out"


def own_tensor_parallelism(key: str, ways: int) -> str:
    """Return the message that asks for ``--tensor-parallel`` in place of transformers' own plan."""
    return (
        f"{key} is {ways}, transformers' own tensor parallelism, which is not modelled; --tensor-parallel {ways} uses "
        "torchtitan's plan instead, with sequence parallelism"
    )


def option_value(name: str, setting: Setting, mine: object, default: object, where: str, *, chosen: bool) -> object:
    """Return the value of an engine's option: the file's, unless a flag or `--set` gives another."""
    if mine == default and not chosen:
        return setting.value
    if mine != setting.value and not setting.filled:
        raise SpecError(_contradiction(f"--set {name}={mine}", where, setting))
    return mine


#: Values that switch a key off, in lower case.
_OFF = ("false", "none", "null", "no", "0", "0.0", "disabled", "", "[]", "{}")
#: The note on a key that changes memory in a way that is not modelled, by its effect.
_EFFECTS = {
    "saves": "may save memory, which is not counted: the answer is the most it takes",
    "adds": "takes memory that is not counted: the answer is too low by that",
    "either": "changes memory in a way that is not modelled: the answer is without it, and may be too low",
}


#: The last words of all keys that other programs read, one line per kind (from tests/catalog/setups/known_keys.py).
KNOWN_KEYS = Path(__file__).with_name("known_keys.txt")


def known_keys(kind: Kind) -> frozenset[str]:
    """Return the last words of the keys that a program reads; empty for programs without a line in KNOWN_KEYS."""
    lines = (line.partition(": ") for line in KNOWN_KEYS.read_text(encoding="utf-8").splitlines())
    return next((frozenset(words.split()) for name, _, words in lines if name == kind), frozenset())


#: Last words of keys that may change memory, and keys that look like them and change none, each with its reason.
MEMORY_KEYS = Path(__file__).with_name("memory_keys.toml")


@cache
def may_matter(key: str) -> bool | None:
    """Whether a key may change memory, by its last word; None where it looks like it and changes none (``memory_keys.toml``).

    >>> may_matter("model.recompute_layers"), may_matter("lora_alpha"), may_matter("optimizer.lr")
    (True, None, False)
    """
    matter, harmless = _memory_keys()
    last = key.rpartition(".")[2].removeprefix("no_")
    if not any(fnmatchcase(last, one) for one in matter):
        return False
    return None if any(fnmatchcase(key, one) or fnmatchcase(last, one) for one in harmless) else True


@cache
def _memory_keys() -> tuple[tuple[str, ...], tuple[str, ...]]:
    table = tomllib.loads(MEMORY_KEYS.read_text(encoding="utf-8"))
    return tuple(table["may_matter"]), tuple(table["harmless"])


class Table:
    """One table of a file: returns values by key, checks their types, and keeps track of the keys read."""

    def __init__(self, data: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.data, self.where, self.prefix = data, where, prefix
        self.read: set[str] = set()
        self.matters: dict[str, str] = {}
        """Keys that change memory in a way that is not modelled, and a note on each."""
        self.saves: set[str] = set()
        """Keys of ``matters`` that can only save memory."""
        self.said: Mapping[str, object] = data
        """The file's own keys."""
        self.left_out: frozenset[str] = frozenset()
        """Keys whose value is the program's default."""

    def name(self, key: str) -> str:
        """Return the key, preceded by the names of its tables."""
        return f"{self.prefix}{key}"

    def get(self, key: str) -> object:
        """Return the value; None if it is left out or null."""
        self.read.add(key)
        return self.data.get(key)

    def wrong(self, key: str, wanted: str) -> SpecError:
        """Return the error for a value of a wrong type or range."""
        return SpecError(f"{self.where}: {self.name(key)}={shown(self.data.get(key))} is not {wanted}")

    def refused(self, key: str, way_out: str = "leave it out") -> SpecError:
        """Return the error for a setting that changes memory in a way that is not modelled."""
        value = shown(self.data.get(key))
        return SpecError(f"{self.where}: {self.name(key)}={value} changes memory in a way that is not modelled; {way_out}")

    def text(self, key: str) -> str | None:
        """Return a text; None if it is left out."""
        value = self.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(key, "a text")

    def switch(self, key: str) -> bool | None:
        """Return true or false, also from a text; None if it is left out."""
        value = self.get(key)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(key, "true or false")

    def count(self, key: str, *, least: int = 1) -> int | None:
        """Return a whole number of at least ``least``, also from a text; None if it is left out."""
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
        """Return a table inside this one, empty if it is left out."""
        value = self.get(key)
        if value is None:
            return Table({}, self.where, f"{self.name(key)}.")
        if not isinstance(value, dict):
            raise self.wrong(key, "a table of keys and values")
        return Table(value, self.where, f"{self.name(key)}.")

    def leave(self, keys: Iterable[str]) -> None:
        """Mark keys as read that change no memory of a training step."""
        self.read.update(keys)

    def judge(self, name: str) -> None:
        """Refuse, note or leave the keys that no reader counts, as a section of ``keys.toml`` says."""
        keys = keys_of(name)
        self.refuse({key: tuple(keys.harmless.get(key, ())) for key in keys.refused.split()})
        self.unmodelled(harmless=keys.harmless, saves=keys.saves, adds=keys.adds, either=keys.either)
        self.leave(keys.known.split())

    def refuse(self, keys: Mapping[str, tuple[object, ...]]) -> None:
        """Raise SpecError for keys that change memory, unless they are off or have a harmless value."""
        for key, harmless in keys.items():
            value = self.get(key)
            if value is None or value in (False, "", [], {}) or value in harmless:
                continue
            raise self.refused(key)

    def like(self, patterns: str) -> list[str]:
        """Return the keys that match one of the patterns, in the file's order, and mark them as read."""
        found = [key for key in self.data if any(fnmatchcase(key, one) for one in patterns.split())]
        self.read.update(found)
        return found

    def unmodelled(self, *, harmless: Mapping[str, Collection[object]] = {}, **effects: str) -> None:
        """Note keys whose effect on memory is not modelled, by patterns: those that save it, add to it, or do either.

        ``harmless`` holds values of keys that change no memory.
        """
        for effect, patterns in effects.items():
            for key in self.like(patterns):
                value = self.data[key]
                if value is not None and str(value).lower() not in _OFF and value not in harmless.get(key, ()):
                    self.matters[key] = f"{self.name(key)}={shown(value)} {_EFFECTS[effect]}"
                    self.saves.update([key] * (effect == "saves"))

    def suspects(self) -> None:
        """Note keys that no reader used and that may change memory, by their names."""
        self.leave(key for key, value in self.data.items() if str(key).endswith("parallel_size") and str(value) == "1")
        unread = {str(key): may_matter(str(key)) for key in self.data if key not in self.read}
        self.leave(key for key, matters in unread.items() if matters is None)
        self.unmodelled(either=" ".join(escape(key) for key, matters in unread.items() if matters))

    def unknown(self, known: Collection[str] = ()) -> Iterator[str]:
        """Yield a note on every key that neither a reader here nor the program knows."""
        for key in sorted(self.data.keys() - self.read, key=str):
            if key not in known:
                yield f"{shown(self.name(str(key)))} is not known here and left out"


class TranslatedTable(Table):
    """A program's settings under the keys of TrainingArguments; errors and notes show the program's keys.

    ``instead`` maps keys of TrainingArguments to the program's keys, ``made`` to the translated values.
    """

    def __init__(self, theirs: Table, instead: Mapping[str, str], made: Mapping[str, object]) -> None:
        kept = {key: value for key, value in theirs.data.items() if key not in instead.values()}
        super().__init__({**kept, **made}, theirs.where)
        self.instead, self.read, self.matters, self.saves = instead, theirs.read, theirs.matters, theirs.saves
        self.said = theirs.said
        self.left_out = frozenset(key for key, own in instead.items() if theirs.data.get(own) is None)

    def name(self, key: str) -> str:
        """Return the program's key."""
        return self.instead.get(key, key)


def _flat(data: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", None if value in ("", "null", "None", "???") else value


class FlatTable(Table):
    """All keys of a file with the names of their tables (``trainer.nnodes``). A value ``${key}`` becomes that key's value."""

    def __init__(self, data: Mapping[str, object], where: str) -> None:
        super().__init__(dict(_flat(data)), where)
        self.leave(("launched_gpus",))
        for key, value in self.data.items():
            if isinstance(value, str) and value.startswith("${") and value.endswith("}"):
                other = self.data.get(value[2:-1])
                self.data = {**self.data, key: None if isinstance(other, str) and other.startswith("${") else other}

    def last(self, key: str) -> str:
        """Return the last word of a dotted value, such as a class's name; empty if it is left out."""
        return str(self.get(key) or "").rpartition(".")[2]

    def unknown(self, known: Collection[str] = ()) -> Iterator[str]:
        """Yield one note on all keys, except null ones, that neither a reader here nor the program knows."""
        unread = [key for key, value in self.data.items() if key not in self.read and value is not None]
        lasts = {key: key.rpartition(".")[2] for key in unread}
        left = [
            shown(key) for key, last in lasts.items() if last[:1] != "_" and not {last, last.removeprefix("no_")} & set(known)
        ]
        if left:
            yield f"{', '.join(left)} {'is' if len(left) == 1 else 'are'} not known here and left out"


def number_of(value: object, otherwise: float) -> float:
    """Return a number, also from a text; ``otherwise`` for anything else."""
    try:
        return otherwise if value is None else float(str(value))
    except ValueError:
        return otherwise


def ends_counted_as_one(program: str) -> str:
    """Return the note on a job that does not follow its program's FSDP2 units."""
    return (
        f"{program} shards the embedding, and the last norm with the head, as units of their own; they are counted as one unit, "
        "gathered from the forward to the end of the backward, which is an upper bound"
    )


def ends_counted_apart(program: str) -> str:
    """Return the note on a job that follows its program's FSDP2 units."""
    return (
        f"the embedding, and the last norm with the head, are FSDP2 units of their own, as {program} shards them; "
        "--set fsdp2.ends_apart=false counts one unit"
    )


NO_GPUS = "the file does not say how many GPUs: zeroplan counts {}, as its degrees need; add --gpus N"
COMPILED = (
    "the step is counted without torch.compile; in the runs that were compared a compiled one took no more "
    "(`zeroplan dryrun` follows the compiler; --fused-kernels compiled-blocks,compiled-loss counts blocks compiled each by itself, "
    "and a compiled loss, under FSDP2)"
)
_AT_ONCE = "not counted: its backward may return all gradients at its end, where this engine frees them one by one"
COMPILED_PARTS = "the step is counted as torch.compile runs it: --fused-kernels {}"
FILLED = "dynamic batches hold up to {} tokens: as many whole sequences are counted"
ULYSSES = "Ulysses' ranks split a sequence outside of attention and its heads inside: a rank's share of its tokens is counted"
LIGER = ("rope", "liger-rms-norm", "liger-swiglu")
_LIGER = "operators other than RMSNorm, rotary positions and SiLU's product are counted as without Liger, which takes no less"
_LOOP = (
    "{} makes the training step a part of a loop: `zeroplan check` judges all of its phases, `zeroplan workflow {} --from FILE` "
    "lists them"
)
_CUT = "which takes as much, and a piece of the logits beside it"


class Reading:
    """The settings read so far from one file's table. Files that it names are looked up in ``folder``."""

    def __init__(self, table: Table, folder: Path = Path()) -> None:
        self.table, self.folder = table, folder
        self.flags: dict[str, Setting] = {}
        self.options: dict[str, Setting] = {}
        self.asks: dict[str, str] = {}
        self.notes: list[str] = []
        self.deepspeed: DeepSpeedPart | None = None
        self.own_units = ""
        self.head_rows: int | None = None
        self.pairs = False
        self.layers_per_stage: tuple[int | None, str] = (None, "")
        self.loop: dict[str, object] = {}
        self.compiled = ""
        """The key that compiles the model as a whole."""

    def set(
        self, flag: str, key: str, value: object, *, filled: bool = False, also: tuple[object, ...] = (), note: str = ""
    ) -> None:  # fmt: skip
        """Set a flag from a key of the file."""
        self.flags[flag] = Setting(self.table.name(key), value, filled or key in self.table.left_out, also, note)

    def set_offload(self, key: str) -> None:
        """Set offloading of parameters, gradients and optimizer states to host memory."""
        for name in ("offload_optimizer", "offload_param"):
            self.set(name, key, "cpu")

    def number(self, flag: str, *keys: str, default: int | None = None, times: int = 1) -> int | None:
        """Set a flag to the count under the first of ``keys`` in the file, or to the program's default; returns the count."""
        key = next((one for one in keys if self.table.data.get(one) is not None), keys[0])
        given = self.table.count(key)
        value = default if given is None else given
        if value is not None:
            self.set(flag, key, value * times, filled=given is None)
        return value

    def set_pairs(self) -> None:
        """Double the sequences of a micro-batch: a pair is a chosen and a rejected one."""
        self.pairs = True
        size = self.flags["micro_batch"]
        self.flags["micro_batch"] = size._replace(value=2 * int(str(size.value)))

    def set_liger(self, *parts: str, key: str, loss: bool) -> None:
        """Set the parts that run in Liger's kernels, by RecipeSpec's names; ``loss``: head and loss are fused too."""
        if parts:
            self.set("fused_kernels", key, ",".join(parts), note=f"{self.table.name(key)}: {_LIGER}")
        if loss:
            self.set("loss", key, "fused", filled=True)

    def set_frozen_tower(self, key: str) -> None:
        """Freeze vision tower and projector if a switch says so and the model is not known to have none."""
        model = self.known_model()
        given = self.table.get(key)
        if given and str(given).lower() != "false" and (model is None or model.vision is not None):
            self.set("freeze", key, "tower,projector")

    def set_largest_image(self, table: Table, *, pixels: str, tokens: str = "") -> None:
        """Set the size of an image to the largest that a key allows, if the file's model is known to resize images to a limit.

        ``pixels`` and ``tokens``: keys with the limit in pixels, and in tokens of the text.
        """
        table.leave((pixels, tokens))
        vision = None if (model := self.known_model()) is None else model.vision
        if vision is None or not vision.has_blocks or vision.fixed_size:
            return
        most, key = table.count(tokens) if tokens else None, tokens
        if most is None and (given := table.count(pixels)) is not None:
            most, key = given // (vision.patch_size * vision.merge_size) ** 2, pixels
        if most:
            width, height = vision.largest_image(most)
            note = f"{table.name(key)}: images are counted as large as it allows"
            self.set("image_size", key, f"{width}x{height}", filled=True, note=note)

    def set_loop(self, key: str, workflow: str, *, alone: bool = False, **options: object) -> None:
        """Set the loop that the training step belongs to; the trainer's default replaces an option that is None.

        ``alone``: only the file's training step is known, and the other phases are not judged.
        """
        given = {name: one for name, one in options.items() if one is not None}
        self.loop = {"workflow": workflow, **given, **({"alone": True} if alone else {})}
        if not alone:
            self.notes.append(_LOOP.format(self.table.name(key), workflow))

    def set_log_probs(self, key: str, *, how: str = "tiles", note: str = "") -> None:
        """Set a loss of log-probabilities; ``how``: :data:`~zeroplan.spec.recipe.LogProbs`."""
        self.set("loss", key, "log-probs", filled=True, note=note)
        self.set("log_probs", key, how, filled=True)

    def set_compiled(self, table: Table, key: str, *, whole: bool = False) -> None:
        """Note that the step is compiled, and that zeroplan counts it without the compiler; ``whole``: the model as one graph."""
        name = table.name(key)
        self.table.matters[name] = f"{name}={shown(table.data[key])}: {COMPILED}"
        self.table.saves.add(name)
        if whole:
            self.compiled = name

    def set_cut_loss(self, key: str) -> None:
        """Set the fused loss for Cut Cross-Entropy, which never holds whole logits (cut_cross_entropy 25.1, cce.py).

        It keeps one number per token and computes both gradients in the backward; Liger's loss holds them from the forward on.
        """
        self.set("loss", key, "fused", filled=True, note=f"{self.table.name(key)} is counted as Liger's fused loss, {_CUT}")

    def degree(self, flag: str, *keys: str) -> int:
        """Set a degree of parallelism above 1; returns the degree. Some programs write 1 as 0 or -1."""
        key = next((one for one in keys if self.table.data.get(one) is not None), keys[0])
        given = self.table.get(key)
        value = 1 if given in (None, 0, -1, "0", "-1", "none") else self.table.count(key) or 1
        if value > 1:
            self.set(flag, key, value)
        return value

    def set_steps(self, key: str, total: int | None, each: int) -> None:
        """Set the micro-batches of a step: ``total`` sequences, divided by the ``each`` that all ranks process at once."""
        if total is not None:
            self.set("grad_accum", key, max(1, -(-total // each)), filled=total % each != 0)

    def set_model(self, key: str, named: str) -> None:
        """Set the model: a local folder with a config.json, or a name, or the last part of any other path."""
        folder = next((path for path in (Path(named), self.folder / named) if _holds_a_config(path)), None)
        if folder is not None:
            self.set("config", key, str(folder))
            return
        last = named.rstrip("/").rpartition("/")[2]
        is_path = named.startswith(("/", ".", "~")) or named.count("/") > 1
        note = f"{self.table.name(key)} is a path without a config.json here, and its last part is taken for the model's name"
        self.set("model", key, last if is_path else named, note=note if is_path else "")

    def known_model(self) -> "ModelSpec | None":
        """Return the file's model if it is in the package's catalogue or written out; None if a ``config.json`` gives it."""
        from zeroplan.catalog.model import model  # noqa: PLC0415  few keys depend on the model
        from zeroplan.spec.model import ModelSpec  # noqa: PLC0415  as above

        named = self.flags.get("model", Setting("", None)).value
        try:
            return model(named) if isinstance(named, str) else named if isinstance(named, ModelSpec) else None
        except ZeroplanError:
            return None

    def unmodelled(self, *, saves: str = "", adds: str = "", either: str = "") -> None:
        """Note the keys whose effect on memory is not modelled, as Table.unmodelled."""
        self.table.unmodelled(saves=saves, adds=adds, either=either)

    def _has_key(self, key: str) -> bool:
        """Whether the file itself has this dotted key."""
        data: object = self.table.said
        if key in self.table.data or key in self.table.said:
            return True
        for part in key.split("."):
            data = data.get(part) if isinstance(data, dict) else None
        return data is not None

    def _pads(self, kind: Kind) -> bool:
        """Whether the program pads the sequences of a micro-batch, and no key joins them instead."""
        return kind in _PADS and not any(str(self.table.data.get(key)).lower() == "true" for key in _JOINS)

    def _compile_whole(self, key: str) -> None:
        """Count or note that a compiled backward returns all gradients at its end. FSDP2's hooks cut the graph at its units."""
        engine = self.flags["engine"].value if "engine" in self.flags else None
        if engine == "ddp":
            self.options["ddp.compiled"] = Setting(key, value=True)
        elif engine in ("deepspeed", "fsdp1"):
            self.table.matters[key] += f"; {_AT_ONCE}"
            self.table.saves.discard(key)

    def setup(self, kind: Kind) -> Setup:
        """Return the settings read, and notes on the keys that no reader used."""
        self.table.suspects()
        if self.compiled:
            self._compile_whole(self.compiled)
        matters = self.table.matters
        notes = (*matters.values(), *self.notes, *self.table.unknown(known_keys(kind)))
        return Setup(
            kind, self.flags, self.options, self.asks, notes, self.deepspeed, own_units=self.own_units, matters=matters,
            saves=frozenset(self.table.saves), head_rows=self.head_rows, pairs=self.pairs, loop=self.loop,
            layers_per_stage=self.layers_per_stage, pads=self._pads(kind),
            used=tuple(dict.fromkeys(one.key for one in (*self.flags.values(), *self.options.values()) if self._has_key(one.key))),
        )  # fmt: skip


def _holds_a_config(path: Path) -> bool:
    try:
        return (path / "config.json").is_file()
    except (OSError, ValueError):
        return False
