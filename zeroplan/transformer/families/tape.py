"""A block written as the operators it runs, and what is alive at every moment of running them forward and backward.

The block's program calls the operators of ``operators.py`` in the order of the module's ``forward``; the tape keeps account
of who holds each tensor: the program by name, or an operator that saved it for its backward. The backward then goes through
the operators the other way round, as autograd does: gradients wait in the buffer of the operator that takes them, a second
one is added to the first, and what an operator saved goes when it is done. Sizes are expressions, so that one tape serves every
batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

from zeroplan.expr import Size, at_least, at_most, symbols
from zeroplan.ledger import PLAIN, Kind, Module, OffGpu, Role, Tag
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.symbols import b, e, r

#: A dtype's symbol on the tape alone: fp32 where CUDA's autocast is on, else the compute dtype.
(CAST_BY_CUDA,) = symbols("F")

#: Bytes per element: fp32's, or a symbol.
Width: TypeAlias = Size | int


class Manner(NamedTuple):
    """How a program's layers run, where that is otherwise than trained, and whole on this rank."""

    linear: "Linear | None" = None
    norms_frozen: bool = False
    """The weights of norms get no gradient."""
    sharded: bool = False
    """Matrices, and between them the sequence, are split over ranks."""


class Store:
    """One piece of memory and who needs it: names, operators that saved it, buffers of gradients."""

    __slots__ = ("holds", "kind", "pieces", "reason", "size", "source", "tag", "twin")

    def __init__(self, kind: Kind, reason: str, size: Size, source: str, tag: Tag = PLAIN) -> None:
        """Begin with one who holds it: its maker."""
        self.kind, self.reason, self.size, self.source, self.tag, self.holds = kind, reason, size, source, tag, 1
        self.twin: Store | None = None
        self.pieces = 1
        """How many tensors of one size it sums up."""


class Value:
    """A tensor that gradients flow to: its memory, and the dtype and elements its gradient has. Views share memory."""

    __slots__ = ("dtype", "shape", "store")

    def __init__(self, store: Store, dtype: Width, shape: Size) -> None:
        """``dtype`` is its bytes per element, ``shape`` its elements."""
        self.store, self.dtype, self.shape = store, dtype, shape


Arriving = list[tuple[Value, Store]]
Backward = Callable[["Tape", list[Store]], Arriving]


class Linear(Protocol):
    """How a linear layer runs: reading ``reads`` features, making ``width``."""

    def __call__(self, tape: "Tape", value: Value, width: Size, site: "Site", *, reads: Size, bias: bool) -> Value: ...  # noqa: D102


class Site(NamedTuple):
    """Where in the module something happens: the name of its moments, its source, and its module where an engine has to know."""

    name: str
    source: str
    module: Module = Module.NONE
    at: At = At.ANYWHERE

    @property
    def place(self) -> Place:
        """Of its moments."""
        return Place(self.at, self.module)


class Operator(NamedTuple):
    """One node of the graph: what it made, what it keeps, and how it turns gradients of its outputs into those of its inputs."""

    name: str
    outputs: tuple[Value, ...]
    saved: tuple[Store, ...]
    backward: Backward
    cast: Size | None
    """Elements of a weight whose autocast copy it uses."""
    saves_weight: bool
    """It saves a weight, which is nobody's activation, but which a recomputation goes on to."""
    place: Place
    module: Module
    """Whose forward ran, where an engine has to know."""
    has_weight: bool
    """It makes the gradient of a weight."""
    owners: tuple["Owner", ...] = ()
    """The modules with weights whose forward ran, an outer one before those in it; where the tape marks them."""


class Half(Enum):
    """What a backward makes in one go: all gradients, those of inputs alone, which frees nothing, or those of weights alone."""

    WHOLE = 1
    INPUTS = 2
    WEIGHTS = 3


class Waiting(NamedTuple):
    """An operator whose weights' gradients are left for the second half of a backward, and the gradients that they are made of."""

    operator: Operator
    taken: tuple[Store, ...]


class Do(Enum):
    """What a program does to memory, one thing after the other."""

    REQUEST = 1
    RELEASE = 2
    GRADIENT = 3
    """Request a weight's gradient, which the engine releases."""
    ARRIVE = 4
    """The gradients requested since have come to their weights."""
    CAST = 5
    """Request autocast's copy of a weight."""
    UNCAST = 6
    """Release it."""
    ENTER = 7
    """The forward of a module with weights begins; only on tapes that mark modules, as all that follows."""
    LEAVE = 8
    """It is over."""
    RETURN = 9
    """Its backward begins."""
    DONE = 10
    """It is over: the gradients of its weights have come to them, that of its input has not been handed on."""


class Owner:
    """A module with weights, as it runs in a program."""

    __slots__ = ()


@dataclass(slots=True)
class Marks:
    """Where a tape is that marks modules."""

    owners: tuple[Owner, ...] = ()
    """Modules with weights whose forward runs."""
    in_leaf: bool = False
    """The innermost of them stands for all modules in it."""
    returned: set[Owner] = field(default_factory=set)
    """Those whose backward has begun."""


Deed: TypeAlias = tuple[Do, "Store | Size | Owner | None"]
"""What is done, and to what: a tensor, the elements of a weight, a module, or nothing."""


@dataclass(slots=True)
class Course:
    """What a program has done to memory so far."""

    deeds: "list[Deed]" = field(default_factory=list)
    """Every request and release, in order."""
    saved_at: int = 0
    """How many there were when an operator last saved something."""
    made_after: "tuple[Store, ...]" = ()
    """What that had made by then, though torch makes it after."""
    outgoing: "Store | None" = None
    """The gradient of what the program was given, once it has gone backward."""
    before_saved: "tuple[Store, ...]" = ()
    """Gradients that wait when the backward first needs what was saved, where a checkpoint is run again."""
    needed_at: int = 0
    """How many deeds there were by then."""
    unsaved: int = 0
    """Moments of the backward before that."""
    copied: "list[Store]" = field(default_factory=list)
    """Copies of what the block is given beside the residual stream, which are made before any checkpoint."""


class Alive(NamedTuple):
    """A moment: what is alive, and of the weights the gradients made so far, those being made, and the casts that are there."""

    name: str
    stores: tuple[Store, ...]
    gradients: tuple[Size, ...]
    current: tuple[Size, ...]
    casts: tuple[Size, ...]
    place: Place = Place()
    before: tuple[Store, ...] = ()
    """What is alive before the operator makes anything, or before its module does, where engines ask for it."""


class Handed(NamedTuple):
    """When an operator's gradients of weights come to them: those made so far, and what is alive, the operator done."""

    gradients: tuple[Size, ...]
    stores: tuple[Store, ...]


class Tape:
    """What a program has done so far. ``saving`` says whether operators save anything, as they do outside a checkpoint.

    ``keeping`` says whether a checkpoint keeps the outputs of every second plain matrix product and of attention's kernel.
    """

    def __init__(
        self, *, wide: bool, autocast: bool, saving: bool, narrow: bool = False, keeping: bool = False, again: bool = False,
        marking: bool = False,
    ) -> None:  # fmt: skip
        """``wide``: the compute dtype is fp32; ``narrow``: weights and residual stream are in it even under autocast.

        ``again``: what is saved is made by a recomputation, and given back as it is used. ``marking``: the course says where
        modules with weights begin and end.
        """
        self.keeping, self.again, self.marks = keeping, again, Marks() if marking else None
        self.wide, self.autocast, self.saving = wide, autocast, saving
        self.wide_residual = autocast and not narrow
        self.manner = Manner()
        self.constants: set[Value] = set()
        """Tensors that autograd does not follow."""
        self.summed_anew: set[Value] = set()
        """Tensors whose gradients autograd never adds in place: DTensors, as all subclasses."""
        self.half = Half.WHOLE
        self.left: list[Waiting] = []
        """Operators whose weights the first half of a backward has left, as it came to them."""
        self.module = Module.NONE
        """Whose forward runs, where an engine has to know."""
        self._last_saving: tuple[int, Alive, tuple[Value, ...]] = 0, Alive("", (), (), (), ()), ()
        """Of the last operator that saved something: the moments before it, itself, and outputs it did not save."""
        self.alive: dict[Store, None] = {}
        self.course = Course()
        self.operators: list[Operator] = []
        self.moments: list[Alive] = []
        self.saved: dict[Store, None] = {}
        self.casts: list[Size] = []
        """Elements of weights whose autocast copies are kept for the backward."""
        self.cached: list[Size] = []
        """The same of copies that autocast holds until its context ends."""
        self.products: list[Store] = []
        """Outputs of plain matrix products, in order."""
        self.kernel_outputs: list[Store] = []
        """Outputs of attention's kernel."""
        self.gradients: list[Size] = []
        self.current: list[Size] = []
        self.waiting: list[Size] = []
        """Of the gradients made those that have not come to their weights yet."""
        self.handed: list[Handed] = []
        """Of every operator that makes gradients of weights, in order."""
        self.entered: dict[Module, tuple[Store, ...]] = {}
        """What is alive when the forward of a module begins that engines have to know."""
        self.reached: dict[Module, tuple[Store, ...]] = {}
        """The same of its backward."""
        self.scratch: list[Store] = []
        self.name = ""
        self.place = Place()
        self.before: tuple[Store, ...] = ()
        """What was alive when the operator began, where engines ask for it."""
        self._linear = Module.NONE
        """The linear layer that went backward last."""
        self.fell = True

    def is_wide(self, dtype: Width) -> bool:
        """Whether a dtype's symbol means fp32 here."""
        return dtype == 4 or self.wide or (dtype == r and self.wide_residual) or (dtype == CAST_BY_CUDA and self.autocast)

    def make(self, kind: Kind, reason: str, size: Size, source: str, tag: Tag = PLAIN) -> Store:
        """Allocate, and note the moment. CUDA's autocast makes fp32 of some (``pow`` is on its fp32 list), a CPU's does not."""
        if size.has(CAST_BY_CUDA):
            size = size.replacing({CAST_BY_CUDA.text: 4 if self.autocast else e})
            if self.autocast:
                reason, tag = f"{reason}, fp32 under CUDA's autocast", tag._replace(off_gpu=OffGpu.HALF)
        if self.module and not tag.module:
            tag = tag._replace(module=self.module)
        store = Store(kind, reason, size, source, tag)
        self.alive[store] = None
        self.course.deeds.append((Do.REQUEST, store))
        self.note()
        return store

    def note(self) -> None:
        """Note what is alive now; in place of the last moment where nothing has gone since."""
        made, making = tuple(self.gradients), tuple(self.current)
        moment = Alive(
            self.name, tuple(self.alive), made, making, (*self.casts, *self.cached), place=self.place, before=self.before
        )
        if not self.fell:
            self.moments.pop()
        self.moments.append(moment)
        self.fell = False

    def hold(self, store: Store) -> Store:
        """One more needs it."""
        store.holds += 1
        return store

    def drop(self, *stores: Store) -> None:
        """One fewer needs each."""
        for store in stores:
            store.holds -= 1
            if not store.holds and store in self.alive:
                self._release(store)

    def _release(self, store: Store) -> None:
        del self.alive[store]
        self.course.deeds.append((Do.RELEASE, store))
        self.fell = True

    def release(self, *values: Value) -> None:
        """A name goes."""
        for value in values:
            self.drop(value.store)
            if value.store.twin is not None:
                self.drop(value.store.twin)

    def used(self, *stores: Store) -> None:
        """What an operator saved has been read by its backward: gone before its gradients are summed and cast, if recomputed.

        A checkpoint's own input stays.
        """
        self.note()
        for store in stores if self.again else ():
            if store.holds == 1 and store in self.alive and store.tag.role is not Role.BLOCK_INPUT:
                self._release(store)

    def part_by_batch(self, store: Store) -> None:
        """Tell apart the store of a single sequence, which a product may save, and that of several, which only names hold."""
        whole, names = store.size, store.holds
        store.size = whole * at_least(0, 2 - b)
        store.twin = Store(store.kind, store.reason, whole * at_most(1, b - 1), store.source, store.tag)
        store.twin.holds = names
        self.alive[store.twin] = None
        self.course.deeds.insert(self.course.deeds.index((Do.REQUEST, store)), (Do.REQUEST, store.twin))
        self.moments = [_with_twin(moment, store) for moment in self.moments]
        before, last, outputs = self._last_saving
        self._last_saving = before, _with_twin(last, store), outputs

    def follows(self, *values: Value) -> bool:
        """Whether autograd follows one of these, and is asked for gradients of inputs."""
        return self.half is not Half.WEIGHTS and not self.constants.issuperset(values)

    def add(
        self, name: str, outputs: tuple[Value, ...], saved: tuple[Store, ...], backward: Backward, *,
        of: tuple[Value, ...] | None, cast: Size | None = None, place: Place | None = None, late: bool = False,
        saves_weight: bool = False,
    ) -> None:  # fmt: skip
        """Put an operator into the graph; what it saves stays until its backward is done.

        Autograd leaves it out where it follows none of the tensors it is made ``of``; None: it has a weight that is trained.
        Operators of torch save before they compute, but for those that do so ``late``.
        """
        if of is not None and not self.follows(*of):
            self.constants.update(outputs)
            return
        kept = saved if self.saving else ()
        for store in kept:
            self.hold(store)
            self.saved[store] = None
        if kept or (saves_weight and self.saving):
            apart = () if late else tuple(value for value in outputs if value.store not in kept)
            self._last_saving = len(self.moments) - 1, self.moments[-1], apart
            self.course.saved_at, self.course.made_after = len(self.course.deeds), tuple([value.store for value in apart])
        self.operators.append(
            Operator(name, outputs, kept, backward, cast, saves_weight, place or Place(), self.module, of is None, self._owners)
        )

    @property
    def _owners(self) -> tuple[Owner, ...]:
        return () if self.marks is None else self.marks.owners

    @contextmanager
    def owning(self, *, leaf: bool = False) -> Iterator[None]:
        """What is put into the graph is that of a module with weights; of a ``leaf`` also what modules in it put there."""
        marks = self.marks
        if marks is None or marks.in_leaf:
            yield
            return
        owner, around = Owner(), marks.owners
        marks.owners, marks.in_leaf = (*around, owner), leaf
        self.course.deeds.append((Do.ENTER, owner))
        yield
        self.course.deeds.append((Do.LEAVE, owner))
        marks.owners, marks.in_leaf = around, False

    @contextmanager
    def inside(self, module: Module) -> Iterator[None]:
        """What is made is a module's."""
        self.entered[module], self.module = tuple(self.alive), module
        yield
        self.module = Module.NONE

    def until_last_saved(self) -> list[Alive]:
        """The moments up to the last operator that saves something, where a recomputation stops (``early_stop``)."""
        before, last, outputs = self._last_saving
        made = [value.store for value in outputs]
        return [*self.moments[:before], last._replace(stores=tuple(store for store in last.stores if store not in made))]

    def product(self, made: Store) -> None:
        """Count a plain matrix product, of which a selective checkpoint keeps every second, the first among them."""
        if self.keeping and len(self.products) % 2 == 0:
            self.hold(made)
        self.products.append(made)

    def by_kernel(self, *made: Store) -> None:
        """Count what attention's kernel has made, which a selective checkpoint keeps."""
        if self.keeping:
            for store in made:
                self.hold(store)
        self.kernel_outputs += made

    def kept(self) -> tuple[Store, ...]:
        """What a selective checkpoint keeps: however many sequences there are, and whoever else needs it."""
        stores = (*self.products[::2], *self.kernel_outputs)
        return tuple([one for store in stores for one in (store, store.twin) if one is not None])

    def temporary(self, reason: str, size: Size, source: str, tag: Tag = PLAIN, *, pieces: int = 1) -> Store:
        """Allocate what is gone when the operator is done."""
        store = self.make(Kind.TEMPORARY, reason, size, source, tag)
        store.pieces = pieces
        self.scratch.append(store)
        return store

    def weight_gradient(
        self, size: Size, *, waits: bool = False, unsummed: tuple[str, Size, str] | None = None, read: tuple[Store, ...] = ()
    ) -> None:  # fmt: skip
        """Make a weight's gradient, which stays for the engine.

        ``waits``: it comes to the weight through an operator that ran before others, and so after their backward.
        ``unsummed``: what it is added up from, reason, size and source; what the operator has ``read`` is done with by then.
        """
        if self.half is Half.INPUTS:
            return
        if unsummed is not None:
            self.temporary(*unsummed)
            self.used(*read)
        self.gradients.append(size)
        self.current.append(size)
        self.course.deeds.append((Do.GRADIENT, size))
        if waits:
            self.waiting.append(size)

    def run_backward(self, output: Value, incoming: Store) -> None:
        """Go through the operators the other way round, with the gradient of the output arriving."""
        self.moments.clear()
        self.cached.clear()
        self.fell = True
        if incoming.size.terms:
            self.alive[incoming] = None
        waiting: dict[Value, Store] = {output: incoming}
        for operator in reversed(self.operators):
            if operator.outputs and all(value in waiting for value in operator.outputs):
                self._return_to(operator)
                if (operator.saved or operator.saves_weight) and not self.course.before_saved:
                    self.course.before_saved = tuple(dict.fromkeys(waiting.values()))
                    self.course.needed_at = len(self.course.deeds)
                    self.course.unsaved = len(self.moments) - (not self.fell)  # the next moment takes the place of the last
                self._step(operator, waiting)
        self.course.outgoing = next(iter(waiting.values()), None)

    def _return_to(self, operator: Operator) -> None:
        """The backward comes to the modules of an operator."""
        if self.marks is not None:
            self.course.deeds += [(Do.RETURN, owner) for owner in operator.owners if owner not in self.marks.returned]
            self.marks.returned.update(operator.owners)

    def _done(self, operator: Operator) -> None:
        """An operator was the first of its modules, whose backward ends with it."""
        before = self.operators[: self.operators.index(operator)] if operator.owners else ()
        earlier = {owner for one in before for owner in one.owners}
        self.course.deeds += [(Do.DONE, owner) for owner in reversed(operator.owners) if owner not in earlier]

    def _step(self, operator: Operator, waiting: dict[Value, Store]) -> None:
        self._begin(operator)
        taken = [waiting.pop(value) for value in operator.outputs]
        arriving = operator.backward(self, taken)
        self.note()
        made = len(self.current) > len(self.waiting)
        self.drop(*self.scratch, *self._done_with(operator, taken))
        self.scratch.clear()
        self.fell = self.fell or bool(self.current) or operator.place.at is At.LOSS  # whose moment engines ask for
        self.current[:] = self.waiting
        if operator.cast is not None:
            self.fell = True
            self.casts.remove(operator.cast)
            self.course.deeds.append((Do.UNCAST, operator.cast))
        if made and self.marks is not None:
            self.course.deeds.append((Do.ARRIVE, None))
        self._done(operator)
        for value, gradient in arriving:
            self._deliver(value, gradient, waiting)
        if made:
            self.course.deeds += [] if self.marks is not None else [(Do.ARRIVE, None)]
            self.handed.append(Handed(tuple(self.gradients), tuple(self.alive)))

    def _done_with(self, operator: Operator, taken: list[Store]) -> tuple[Store, ...]:
        """What goes with an operator: the gradients that it took, and what it saved, unless a second half needs them."""
        if self.half is Half.WHOLE:
            return (*taken, *operator.saved)
        if not operator.has_weight:
            return tuple(taken)
        self.left.append(Waiting(operator, tuple(taken)))
        return ()

    def run_to_inputs(self, output: Value, incoming: Store) -> None:
        """Go through the operators for the gradients of inputs alone; what has a weight is left for :meth:`run_weights`."""
        self.half = Half.INPUTS
        self.run_backward(output, incoming)

    def run_weights(self, waiting: Waiting) -> tuple[tuple[Store, ...], tuple[Store, ...]]:
        """Make the gradients of an operator's weights that were left: what that takes beside them, and what goes then."""
        self.half = Half.WEIGHTS
        waiting.operator.backward(self, list(waiting.taken))
        beside = tuple(self.scratch)
        self.drop(*self.scratch)
        self.scratch.clear()
        before = tuple(self.alive)
        self.drop(*waiting.taken, *waiting.operator.saved)
        return beside, tuple([store for store in before if store not in self.alive])

    def _begin(self, operator: Operator) -> None:
        self.name, self.place = operator.name, operator.place
        if self.place.at is At.LINEAR:
            self._linear = self.place.module
        elif self.place.at is At.ANYWHERE:
            self.place = Place(At.BETWEEN, self._linear)
        reached = self.reached.setdefault(operator.module, tuple(self.alive))
        self.before = {At.LINEAR: tuple(self.alive), At.WEIGHTING: reached}.get(self.place.at, ())

    def _deliver(self, value: Value, gradient: Store, waiting: dict[Value, Store]) -> None:
        """Add to a gradient that waits already: in place where nobody else has it (torch, csrc/autograd/input_buffer.cpp)."""
        if value in self.constants:
            self.drop(gradient)
            return
        first = waiting.get(value)
        if first is None:
            waiting[value] = gradient
            return
        if first.holds == 1 and value not in self.summed_anew:
            self.drop(gradient)
            return
        waiting[value] = self.make(first.kind, first.reason, first.size, first.source, first.tag)
        self.drop(first, gradient)


def _with_twin(moment: Alive, store: Store) -> Alive:
    """The moment, with what of a store is another's now."""
    if store.twin is None or store not in moment.stores:
        return moment
    return moment._replace(stores=(*moment.stores, store.twin))
