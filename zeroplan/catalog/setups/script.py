"""Finds the program that a shell script launches, its arguments and its GPUs.

The script is parsed, never run. Variables set in the script and defaults (``${NAME:-8}``) are expanded; of a condition the first
branch counts. Values known only to the shell ($1, $(hostname), the environment) and placeholders (<path>) count as left
out.
"""

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from zeroplan.catalog.text import one_line
from zeroplan.errors import SpecError

#: Limit of a script, and of a word after expansion; launcher scripts are shorter. [characters]
_LONGEST = 1 << 17
_TOKEN = re.compile(
    r"(?P<comment>(?<![^\s;(])#[^\n]*)|(?P<end>[\n;|&()]+)|[ \t\r]+|"
    r"(?P<word>(?:\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|\$\(\([^\n]*?\)\)(?!\))|\$\((?!\()[^()\n]*(?:\([^()\n]*\)[^()\n]*)*\)|\$\{[^}\n]*\}|"
    r"`[^`\n]*`|[^\s;|&()'\"\\`])+)|(?P<stray>.)",
    re.DOTALL,
)
_PIECE = re.compile(
    r"'(?P<plain>[^']*)'|\"(?P<quoted>(?:\\.|[^\"\\])*)\"|\$\(\((?P<sum>[^\n]*?)\)\)(?!\))|(?P<run>\$\([^\n]*\)|`[^`]*`)|"
    r"\$\{(?P<braced>[^}]*)\}|\$(?P<bare>\w+|[@*#?$!-])|\\(?P<escaped>.)|(?P<text>[^'\"$\\`]+|.)",
    re.DOTALL,
)
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)", re.DOTALL)
_HEREDOC = re.compile(r"read\s+-r\s+-d\s+''\s+(\w+)\s*<<-?\s*['\"]?(\w+)['\"]?\n(.*?)\n\s*\2\b", re.DOTALL)
_HYDRA = re.compile(r"(?P<plus>\+{0,2}|~)(?P<key>[A-Za-z_][\w.@/-]*)=(?P<value>.*)", re.DOTALL)
#: Launchers' arguments, anywhere in a command.
OF_LAUNCHERS = ("nproc_per_node", "nnodes", "num_nodes", "num_gpus", "num_processes")
_SUMS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


class Launched(NamedTuple):
    """A command: its words up to the program's arguments, these arguments, the launcher's, and the variables set for it."""

    words: tuple[str, ...]
    arguments: dict[str, object]
    launcher: dict[str, object]
    variables: Mapping[str, str]

    @property
    def gpus(self) -> int | None:
        """GPUs of all nodes that torchrun, accelerate, deepspeed or ms-swift are set to use; None if left out."""
        known = {**self.variables, **{key: one for key, one in self.arguments.items() if key in OF_LAUNCHERS}, **self.launcher}
        each = _count(known, "nproc_per_node", "NPROC_PER_NODE", "num_gpus")
        nodes = _count(known, "nnodes", "NNODES", "num_nodes") or 1
        visible = known.get("CUDA_VISIBLE_DEVICES")
        if each is None and isinstance(visible, str) and visible:
            each = len(visible.split(","))
        return _count(known, "num_processes") or (None if each is None else each * nodes)


def _count(known: Mapping[str, object], *names: str) -> int | None:
    values = (known[name] for name in names if name in known)
    found = (str(one[0] if isinstance(one, list) else one) for one in values)
    return next((int(one) for one in found if one.isascii() and one.isdigit() and 0 < len(one) < 7), None)


def launches(text: str, where: str) -> tuple[Launched, ...]:
    """Return the commands of a script, those with most arguments first; raises SpecError if the script is too long."""
    if len(text) > _LONGEST:
        raise SpecError(f"{where} has more than {_LONGEST} characters; that is no launcher script")
    text = _HEREDOC.sub(lambda found: f'{found[1]}="{found[3]}"', text).replace("\\\r\n", " ").replace("\\\n", " ")
    shell = _Shell(where)
    found = [one for words in shell.commands(text) if (one := _launched(words, shell.values))]
    return tuple(sorted(found, key=lambda one: -len(one.arguments)))


class _Shell:
    """The variables that a script's text sets."""

    def __init__(self, where: str) -> None:
        self.where, self.values = where, dict[str, str]()
        self.lists: dict[str, list[str]] = {}

    def commands(self, text: str) -> Iterator[list[str]]:
        """Yield the words of each command, with variables expanded."""
        words: list[str] = []
        skipped, array = 0, ""
        for token in (*_TOKEN.finditer(text), None):
            ends = token is None or token["end"]
            if array and token is not None:
                array = "" if ends and ")" in token["end"] else array
                if token["word"]:
                    self.lists[array] += self.split(token["word"])
            elif not ends and token is not None:
                words += [token["word"]] if token["word"] else []
            else:
                skipped = _skipped(words, skipped)
                if not skipped and words and (array := self._array(words, token["end"] if token else "")):
                    words = words[:-1]
                yield from () if skipped else self._run(words)
                words = []

    def _array(self, words: list[str], end: str) -> str:
        """Return the name of the array that begins here (``NAME=(``); empty if none does."""
        begun = re.fullmatch(r"(\w+)(\+?)=", words[-1]) if end.startswith("(") else None
        if begun is None:
            return ""
        self.lists[begun[1]] = self.lists.get(begun[1], []) if begun[2] else []
        return begun[1] if ")" not in end else ""

    def _run(self, words: list[str]) -> Iterator[list[str]]:
        while words and words[0] in ("export", "declare", "local", "then", "do", "else", "if", "time", "exec", "env", "!", "{"):
            words = words[1:]
        while words and (found := _ASSIGNED.fullmatch(words[0])):
            value = " ".join(self.split(found["value"])) if found["value"] else ""
            self.values[found["name"]] = self._short((self.values.get(found["name"], "") if found["more"] else "") + value)
            words = words[1:]
        if words:
            yield [one for word in words for one in self.split(word)]

    def split(self, word: str) -> list[str]:
        """Return the words that a word expands to; text outside quotes is split at spaces."""
        if not re.search(r"['\"$`\\]", word):
            return [word]
        whole = re.fullmatch(r"\"?\$\{(\w+)\[[@*]\]\}\"?", word)
        if whole:
            return [part for one in self.lists.get(whole[1], []) for part in (one.split() if '"' not in word else [one])]
        made = "".join(self._filled(piece) for piece in _PIECE.finditer(word))
        if re.match(r"['\"]|[\w.+@/-]+=", word):
            return [self._short(made)]
        return self._short(made).split() or (
            [] if re.search(r"[$][{]?(\w*(ARG|OPT|EXTRA)|[@*])", word, re.IGNORECASE) else [""]
        )

    def _filled(self, piece: re.Match[str]) -> str:
        if piece["quoted"] is not None:
            return "".join(self._filled(one) for one in _PIECE.finditer(piece["quoted"].replace("'", "\\'")))
        if piece["sum"] is not None:
            return self._sum(piece["sum"])
        if piece["braced"] is not None:
            name, sign, default = re.fullmatch(r"(\w*)(:?[-=]?)(.*)", piece["braced"], re.DOTALL).groups()  # type: ignore[union-attr]
            own = self.values.get(name, " ".join(self.lists.get(name, [])))
            return own or ("".join(self._filled(one) for one in _PIECE.finditer(default)) if sign.endswith(("-", "=")) else "")
        if piece["bare"] is not None:
            return self.values.get(piece["bare"], " ".join(self.lists.get(piece["bare"], [])))
        if piece["run"] is not None:
            return self._sum(piece["run"][7:-1]) if piece["run"].startswith("$(expr ") else ""
        return piece["plain"] or piece["escaped"] or piece["text"] or ""

    def _sum(self, text: str) -> str:
        """Return the value of ``$((A * 8))``; empty if a variable is not set."""
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda found: self.values.get(found[1], "?"), text)
        try:
            return str(_computed(ast.parse(filled.strip(), mode="eval").body)) if len(filled) < 200 else ""
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return ""

    def _short(self, value: str) -> str:
        if len(value) > _LONGEST:
            raise SpecError(f"{self.where} makes a word of more than {_LONGEST} characters; that is no launcher script")
        return value


def _skipped(words: list[str], depth: int) -> int:
    """Return the depth of skipped branches after these words; branches from ``else`` or ``elif`` to ``fi`` are skipped."""
    first = words[0] if words else ""
    if first in ("else", "elif") and not depth:
        return 1
    if depth and first == "if":
        return depth + 1
    return depth - 1 if depth and first == "fi" else depth


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 10**15:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        return int(_SUMS[type(node.op)](_computed(node.left), _computed(node.right)))
    raise ValueError


#: Programs that a command runs by name and verb; other programs are modules or Python files.
_VERBS = {
    "swift": ("sft", "pt", "rlhf"), "megatron": ("sft", "pt", "rlhf"), "llamafactory-cli": ("train",), "axolotl": ("train",),
    "tune": ("run",), "automodel": ("finetune", "pretrain"), "trl": ("sft", "dpo", "grpo", "kto", "reward", "rloo"),
    "litgpt": ("finetune", "finetune_lora", "finetune_full", "pretrain"),
}  # fmt: skip


#: A value that the user of a script has to replace, such as ``<path>``.
_PLACEHOLDER = re.compile(r"<[^<>\n]+>")


def _launched(words: list[str], variables: Mapping[str, str]) -> Launched | None:
    at = _program(words)
    if at is None:
        return None
    # of two programs, such as `ray job submit -- python train.py`, the later one trains
    known = _arguments(words[at + 1 :])
    arguments = {key: one for key, one in known.items() if not (isinstance(one, str) and _PLACEHOLDER.fullmatch(one))}
    return Launched(tuple(words[: at + 1]), arguments, _arguments(words[:at]), dict(variables)) if arguments else None


def _program(words: list[str]) -> int | None:
    """Return the index of the last program's word in a command; None if there is none."""
    found = None
    for at, word in enumerate(words):
        before, after = words[at - 1] if at else "", words[at + 1] if at + 1 < len(words) else ""
        if word.rpartition("/")[2] in _VERBS and after in _VERBS[word.rpartition("/")[2]]:
            return at + 1
        is_value = before.startswith("--") and "=" not in before and before not in ("--", "--module", "--standalone")
        if before in ("-m", "--module") or (word.endswith(".py") and not is_value) or word.startswith("openrlhf.cli."):
            found = at
            if before == "-m" or word.endswith(".py"):
                break
    return found


def _arguments(words: list[str]) -> dict[str, object]:
    """Return ``--key value``, ``--key=value``, ``--flag`` and ``key=value``; other words under the empty key.

    ``-`` and ``_`` in keys are equal. A value of several words becomes a list.
    """
    found: dict[str, object] = {"": []}
    key = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, sign, value = word.lstrip("-").partition("=")
            key = name.replace("-", "_")
            found[key] = value if sign else True
            key = "" if sign else key
        elif (hydra := _HYDRA.fullmatch(word)) and not (key and found[key] is True):
            found[hydra["key"]], key = hydra["value"], ""
        else:
            old = found[key]
            if not word and old is not True:
                continue
            found[key] = [*old, word] if isinstance(old, list) else word if old is True else [old, word]
    rest = found.pop("")
    return {**found, **({"": rest} if rest else {})}


def is_script(text: str, path: Path) -> bool:
    """Whether a file is a shell script, by its suffix or its first line."""
    return path.suffix.lower() in (".sh", ".bash", ".slurm", ".sbatch") or bool(re.match(r"#!\s*/\S*\b(ba|z)?sh\b", text))


def is_arguments(text: str) -> bool:
    """Whether a file is arguments and nothing else, such as those of Megatron-LM that ``zeroplan plan --emit megatron`` writes."""
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    return bool(lines) and all(re.match(r"--[A-Za-z]", line) for line in lines)


def arguments_of(text: str, where: str) -> dict[str, object]:
    """Return the arguments of such a file by their names, ``-`` and ``_`` being the same; raises SpecError for an open quote."""
    try:
        return _arguments(shlex.split(text, comments=True))
    except ValueError as error:
        raise SpecError(f"{where}: {one_line(str(error))}") from None
