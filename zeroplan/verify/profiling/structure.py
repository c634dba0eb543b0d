"""In which order are a module's parameters registered, and which of its blocks are alike?"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn

from zeroplan.errors import MeasurementError
from zeroplan.spec.profile import Run
from zeroplan.verify.fake_cuda.fake_tensors import fake_tensors
from zeroplan.verify.profiling.anatomy import Anatomy
from zeroplan.verify.training.modules import prefixes_of, shapes_of
from zeroplan.verify.training.workload import Workload
from zeroplan.verify.watching.tracker import Tracker


class Structure(NamedTuple):
    """Parameters in order with their shapes, and blocks with their kinds."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    names: tuple[str, ...]
    """The blocks' names, each with a dot at the end."""
    kinds: tuple[str, ...]
    traced: dict[str, int]
    """For each kind, the index of the traced block that represents it."""
    traced_names: tuple[str, ...]
    traced_kinds: tuple[str, ...]
    tied: str | None
    buffer_bytes: int
    attribute_bytes: int
    frozen: frozenset[str]

    @property
    def outside(self) -> list[tuple[str, tuple[int, ...]]]:
        """Parameters outside the blocks."""
        return [(name, shape) for name, shape in self.parameters if not any(name.startswith(prefix) for prefix in self.names)]

    @property
    def order(self) -> tuple[str, ...]:
        """Parameters outside the blocks in the order of registration; an empty name represents the blocks."""
        inside = [any(name.startswith(prefix) for prefix in self.names) for name, _ in self.parameters]
        names = ["" if within else name for within, (name, _) in zip(inside, self.parameters, strict=True)]
        return tuple(dict.fromkeys(names))

    def inside(self, at: int) -> list[tuple[str, tuple[int, ...]]]:
        """A block's parameters."""
        return [(name, shape) for name, shape in self.parameters if name.startswith(self.names[at])]

    def runs(self) -> tuple[dict[str, int], tuple[Run, ...]]:
        """The first index of each kind, and the runs of equal blocks."""
        runs: list[Run] = []
        for kind in self.kinds:
            layers = runs.pop().layers if runs and runs[-1].kind == kind else 0
            runs.append(Run(kind=kind, layers=layers + 1))
        return {kind: self.kinds.index(kind) for kind in self.kinds}, tuple(runs)


def structure_of(
    make: Callable[[], Workload], layer_kinds: tuple[str, ...] | None, probe: Callable[[], Anatomy], say: Callable[[str], None],
    *, shorten: Callable[[int], None] | None = None, places: tuple[int, ...] | None = None,
) -> Structure:  # fmt: skip
    """The structure of a module, built on fake tensors; ``probe`` traces one pass to see which blocks are alike.

    ``say`` receives a line for each other list of modules that could be blocks. ``shorten``, for a module that already exists
    on fake tensors, is called with the number of blocks that contains every kind. ``places``: the indices of the traced blocks, if
    not the first ones.
    """
    with fake_tensors(Tracker(), "cpu") if shorten is None else nullcontext():
        whole = make()
        if not whole.blocks:
            raise MeasurementError(
                "the module has no list of blocks (an nn.ModuleList), so it cannot be profiled block by block"
            )
        names = prefixes_of(whole.module, whole.blocks)
        for one in _other_lists(whole, names):
            say(one)
        keys = _keys(whole, layer_kinds)
        twice = _in_two_places(whole, names)
        parameters = shapes_of(whole.module)
        frozen = frozenset(name for name, one in whole.module.named_parameters() if not one.requires_grad)
        buffers = sum(one.nbytes for one in whole.module.buffers())
        attributes = sum(one.nbytes for one in _attributes(whole.module))
    seen = probe()
    traced = len(seen.blocks)
    if traced == len(keys):
        sizes = (sorted(piece.n_bytes for piece in block.kept) for block in seen.blocks)
        keys = [(*key, *size) for key, size in zip(keys, sizes, strict=True)]
    named = _named(keys)
    if shorten is not None:
        traced = fewest(keys)
        shorten(traced)
    kinds = tuple(named[at] for at in places or range(traced))
    return Structure(
        parameters, names, tuple(named), _standing(kinds), seen.names[:traced], kinds, _tied(twice, seen), buffers, attributes,
        frozen,
    )  # fmt: skip


_FEWEST_LAYERS = 3
"""A first, a last, and one between that represents the rest."""


def fewest(keys: Sequence[object]) -> int:
    """How many of the first blocks contain every kind, where no kind occurs only as the last of them.

    >>> fewest("aaaaaa"), fewest("aabaab")
    (3, 4)
    """
    return min(len(keys), max(_FEWEST_LAYERS, max(keys.index(key) for key in keys) + 2))


def _attributes(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that parts hold as plain attributes, such as Qwen-Image's table of rotary angles."""
    for part in module.modules():
        yield from (one for one in vars(part).values() if isinstance(one, torch.Tensor))


def _keys(work: Workload, layer_kinds: tuple[str, ...] | None) -> list[tuple[object, ...]]:
    """Each block's key, by which blocks differ before a run: class, parameters, and the configuration's kind of layer."""
    kinds = layer_kinds or ("",) * len(work.blocks)
    return [(type(block).__name__, shapes_of(block), kind) for block, kind in zip(work.blocks, kinds, strict=False)]


def _other_lists(work: Workload, names: Sequence[str]) -> Iterator[str]:
    """A line for each list of modules that could be blocks as well: an encoder-decoder has two."""
    mine, reported = names[0].rstrip(".").rpartition(".")[0], list[str]()
    for name, part in work.module.named_modules():
        inside = f"{name}.".startswith((*names, *reported)) or any(one.startswith(f"{name}.") for one in names)
        if isinstance(part, nn.ModuleList) and not inside and len(part) > 1 and all(map(_is_compound, part)):
            reported.append(f"{name}.")
            yield (
                f"{name!r} is a list of {len(part)} modules beside the {len(names)} blocks of {mine!r}: engines shard its modules "
                "together with the root, here as in `zeroplan verify`; to shard each by itself, return a Workload "
                "(zeroplan.verify.training.workload) that names all blocks"
            )


def _is_compound(module: nn.Module) -> bool:
    """Whether a module has children and parameters, as a block has; a single layer has no children."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _in_two_places(work: Workload, names: Sequence[str]) -> tuple[str, ...]:
    """Parameters outside the blocks that have two names."""
    first: dict[int, str] = {}
    found: list[str] = []
    for name, parameter in work.module.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) == name:
            continue
        if any(one.startswith(tuple(names)) for one in (name, known)):
            raise MeasurementError(f"{known!r} and {name!r} are one parameter; a parameter shared by blocks cannot be profiled")
        found.append(known)
    return tuple(dict.fromkeys(found))


def _tied(twice: Sequence[str], seen: Anatomy) -> str | None:
    """The shared parameter whose gradient waits for the embedding's backward: a tied head. None without one.

    Parameters shared only behind the blocks, as the bias of BERT's head, are like any other.
    """
    waiting = [name for name in twice if name not in seen.tail]
    if waiting[1:]:
        raise MeasurementError(
            f"{waiting[0]!r} and {waiting[1]!r} each have two names; a module with two tied parameters cannot be profiled"
        )
    return next(iter(waiting), None)


def _named(keys: Sequence[tuple[object, ...]]) -> list[str]:
    """The names of the kinds: the class, with a number if several kinds share it."""
    distinct = list(dict.fromkeys(keys))
    classes = [str(key[0]) for key in distinct]
    names = {
        key: cls if classes.count(cls) == 1 else f"{cls}_{classes[:at].count(cls) + 1}"
        for at, (key, cls) in enumerate(zip(distinct, classes, strict=True))
    }
    return [names[key] for key in keys]


def _standing(kinds: Sequence[str]) -> dict[str, int]:
    """The index of the block that represents each kind: a middle one, neither first nor last if possible."""
    places: dict[str, list[int]] = {}
    for at, kind in enumerate(kinds):
        places.setdefault(kind, []).append(at)
    inner = {kind: [at for at in found if 0 < at < len(kinds) - 1] or found for kind, found in places.items()}
    return {kind: found[len(found) // 2] for kind, found in inner.items()}
