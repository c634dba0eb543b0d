"""The tape: it runs a block's operators forward and backward, and records the live tensors at every moment.

A family's program calls operators (``operators.py``) in the order of the module's ``forward``. The tape counts each tensor's
holders: Python variables of the forward, and operators that saved it for their backward. The backward runs the operators in
reverse, as autograd does. A gradient waits until the operator that needs it runs. Autograd adds a second gradient of the same
tensor to the first. When an operator is done, what it saved is freed. Sizes are expressions, so that one tape serves every
batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Literal, NamedTuple, Protocol, TypeAlias

from zeroplan.expr import Size, at_least, at_most, symbols
from zeroplan.ledger import PLAIN, Among, Kind, Module, OffGpu, Role, Tag
from zeroplan.spec.adapter import Quantize, Stacked
from zeroplan.spec.recipe import SENDING
from zeroplan.transformer.blocks import At, Place
from zeroplan.transformer.families.tags import CUDA_ALONE
from zeroplan.transformer.offloaded import SAVED_ON_CPU
from zeroplan.transformer.symbols import T, T_p, X, X_r, b, e, h, r, t

#: Symbols that only the tape knows: a dtype (fp32 under CUDA's autocast, else the compute dtype); and the tokens that a rank
#: routes to experts, which is its share if tensor-parallel ranks have the same tokens; their (token, expert) pairs; and the width
#: that experts read and write.
CAST_BY_CUDA, T_own, P_own, h_own = symbols("F T_own P_own h_own")

#: Source of the extra GPU memory that activation offload needs beyond the moved tensors.
ON_ITS_WAY = "torch 2.13, aten/src/ATen/native/cuda/Copy.cu, copy_requires_temporaries"

#: Bytes per element: 4 for fp32, or a symbol.
Width: TypeAlias = Size | int

# --- tensors -----------------------------------------------------------------------------------------------------------------


class Store:
    """One piece of memory, and the number of its holders: variables, operators that saved it, waiting gradients."""

    __slots__ = ("holds", "is_view", "kind", "pieces", "reason", "size", "source", "tag", "twin")

    def __init__(self, kind: Kind, reason: str, size: Size, source: str, tag: Tag = PLAIN) -> None:
        self.kind, self.reason, self.size, self.source, self.tag, self.holds = kind, reason, size, source, tag, 1
        self.twin: Store | None = None
        self.pieces = 1
        """The number of tensors of equal size that it represents."""
        self.is_view = False
        """It is a view, whose base is a second owner of the memory."""


class Value:
    """A tensor that gets a gradient: its memory, bytes per element, and elements. Views share memory."""

    __slots__ = ("copy", "dtype", "is_matrix", "shape", "store", "strided")

    def __init__(
        self, store: Store, dtype: Width, shape: Size, *, strided: bool = False, is_matrix: bool = False
    ) -> None:  # fmt: skip
        """``dtype``: bytes per element; ``shape``: number of elements; ``strided``: a view with gaps between its rows.

        ``is_matrix``: it has two dimensions, so that a linear layer multiplies it as it is, and not a view of it.
        """
        self.store, self.dtype, self.shape, self.strided, self.is_matrix = store, dtype, shape, strided, is_matrix
        self.copy: Store | None = None
        """A copy that an operator saved instead, while a variable holds the original. The tape counts the original as saved."""


class Beside(NamedTuple):
    """A tensor that an operator saves and the block does not own: a weight, or a table of positions."""

    reason: str
    size: Size
    """[bytes]"""
    strided: bool = False
    """A view whose order differs from that of memory."""
    brief: bool = False
    """Its backward reads it when less is alive than at another moment."""


Saved: TypeAlias = tuple["Store | Value", ...]
"""The tensors that an operator saves: whole, or as the views that it reads."""
Arriving = list[tuple[Value, Store]]
"""The return value of a backward: tensors, each with its gradient."""
Backward = Callable[["Tape", list[Store]], Arriving]
"""The backward of an operator; its argument is the gradients of the operator's outputs."""

# --- operators ---------------------------------------------------------------------------------------------------------------


class Linear(Protocol):
    """A way to run a linear layer from ``reads`` to ``width`` features."""

    def __call__(self, tape: "Tape", value: Value, width: Size, site: "Site", *, reads: Size, bias: bool) -> Value: ...  # noqa: D102


class LowRank(NamedTuple):
    """The low-rank adapters of a layer of Megatron-Core, whose own weights are frozen."""

    layers: tuple[str, ...]
    """Megatron-Core's names of the matrices that have an adapter."""
    dropout: bool
    """An adapter drops elements of its input."""
    keeps_normal: bool
    """A frozen matrix that has a norm in it keeps the norm's output."""


class Mode(NamedTuple):
    """How a program's layers run, if they are not all trained on one rank."""

    linear: Linear | None = None
    weights_frozen: bool = False
    """The weights of norms and experts get no gradient, nor do single parameters such as biases of a state space."""
    stacked: Stacked = Stacked()
    """The weights of all experts, and of the router, that have adapters."""
    wide_adapters: bool = False
    """Adapters are fp32 without autocast."""
    quantised_experts: Quantize = "none"
    """How the weights of all experts are quantised."""
    sharded: bool = False
    """Tensor-parallel ranks split matrices and, between them, the sequence."""
    projections: "Callable[[Tape, Value], tuple[Value, ...]] | None" = None
    """One function runs the projections of queries, keys and values."""
    mlp: "Callable[[Tape, Value], Value] | None" = None
    """One function runs a gated MLP of SiLU."""
    norm: "Callable[[Tape, Value, Size, Size, Site], Value] | None" = None
    """One function runs a norm: its input, the weight's elements, the rows."""
    rotary: "Callable[[Tape, Value, Site], Value] | None" = None
    """One function rotates queries, or keys."""
    gate: "Callable[[Tape, Value, Value, str], Value] | None" = None
    """One function multiplies ``up`` by the activated gate: both, and the product's reason."""
    fused: tuple[str, ...] = ()
    """Parts that fused kernels replace, as ``RecipeSpec.fused_kernels`` names and explains them."""
    latent_experts: bool = False
    """Experts read and write a latent that is narrower than the residual stream."""
    uneven: bool = False
    """More pairs of a token and an expert come to this rank than it sends."""
    expert_by_expert: bool = False
    """transformers multiplies the experts one after the other: torch's ``grouped_mm`` needs compute capability 8.0."""
    low_rank: LowRank | None = None
    """Megatron-Core's matrices are frozen, and some have adapters."""

    @property
    def sends_by(self) -> str:
        """How NeMo AutoModel's own experts get their tokens; empty for transformers' experts."""
        return "".join(SENDING.intersection(self.fused))

    @property
    def keeps(self) -> str:
        """What a selective checkpoint keeps: by default products and kernels' outputs; router-kept or inputs-kept."""
        return "".join({"router-kept", "inputs-kept"}.intersection(self.fused))


class Site(NamedTuple):
    """Where an operator runs: the name of its moments, its source, and its module if engines need to know it."""

    name: str
    source: str
    module: Module = Module.NONE
    at: At = At.ANYWHERE
    layer: str = ""
    """The name of its linear layer, where that is not the last part of ``module``."""

    @property
    def is_linear_layer(self) -> bool:
        """Whether its module is an ``nn.Linear``, as most routers are not."""
        return bool(self.module or self.layer)

    @property
    def place(self) -> Place:
        """The place of its moments."""
        return Place(self.at, self.module)


class Operator(NamedTuple):
    """One node of autograd's graph."""

    name: str
    outputs: tuple[Value, ...]
    saved: tuple[Store, ...]
    backward: Backward
    cast: Size | None
    """Elements of the weight whose autocast copy it uses."""
    saves_weight: bool
    """It saves a weight. A weight is no activation, but a recomputation still has to run this operator."""
    place: Place
    module: Module
    """The module whose forward runs it, if engines need to know it."""
    has_weight: bool
    """Its backward makes the gradient of a weight."""
    owners: tuple["Owner", ...] = ()
    """The modules with weights whose forward runs it, outer modules first; only on a tape that marks modules."""
    on_host: tuple[Store, ...] = ()
    """Copies in host memory of its saved tensors. They return to the GPU for its backward."""
    needs: tuple["Part", ...] = ()
    """Parts of the program that a checkpoint of their own recomputes before its backward."""


class Half(Enum):
    """The gradients that a backward makes: all; those of inputs only, which frees no saved tensor; or those of weights only."""

    WHOLE = 1
    INPUTS = 2
    WEIGHTS = 3


class Deferred(NamedTuple):
    """An operator whose weight gradients the second half of a backward makes, and the output gradients that it needs."""

    operator: Operator
    taken: tuple[Store, ...]


# --- what the tape records ---------------------------------------------------------------------------------------------------


class Do(Enum):
    """One action of a program on memory."""

    REQUEST = 1
    RELEASE = 2
    GRADIENT = 3
    """Request a weight's gradient, which the engine releases."""
    ARRIVE = 4
    """The gradients requested since the last arrival reach their weights."""
    CAST = 5
    """Request autocast's copy of a weight."""
    UNCAST = 6
    """Release that copy."""
    ENTER = 7
    """A module with weights begins its forward. This action and the next three exist only on a tape that marks modules."""
    LEAVE = 8
    """The module ends its forward."""
    RETURN = 9
    """The module begins its backward."""
    DONE = 10
    """The module ends its backward: its weights have their gradients, but its input's gradient is not delivered yet."""
    SEND = 11
    """Ranks that split the model or the batch run a collective."""


class Exchange(NamedTuple):
    """A collective among ranks that split the model or the batch."""

    operation: str
    among: Among
    size: Size
    """Its largest buffer. [bytes]"""
    kept: bool = False
    """A selective checkpoint keeps its output, so the recomputation skips the collective."""


class Part:
    """A part of a program: the tensors that a checkpoint of its own frees, and when the backward makes them again."""

    __slots__ = ("module", "since", "stores")

    def __init__(self, module: str) -> None:
        """``module``: its name among Megatron-Core's ``recompute_modules``, or another that code knows."""
        self.module = module
        self.stores = set[Store]()
        """The tensors made in its forward, but for its output."""
        self.since: int | None = None
        """The number of moments of the backward before its tensors are made again."""


class Owner:
    """A module with weights, as a program runs it."""

    __slots__ = ()


class Marks:
    """The modules that run now, on a tape that marks modules."""

    def __init__(self) -> None:
        """Begin outside all modules."""
        self.owners: tuple[Owner, ...] = ()
        """Modules with weights whose forward runs now, outer modules first."""
        self.in_leaf = False
        """Whether the innermost of these modules owns the operators of all modules inside it."""
        self.returned = set[Owner]()
        """Modules whose backward has begun."""


class InHost:
    """Tensors that activation offload has moved."""

    def __init__(self) -> None:
        """Begin without any."""
        self.copies = list[Store]()
        """Copies in host memory of the saved tensors, in order."""
        self.back = list[Store]()
        """Copies of these on the GPU, which the current operator of the backward reads."""


Action: TypeAlias = tuple[Do, "Store | Size | Owner | Exchange | None"]
"""An action and its object: a tensor, elements of a weight, a module, a collective, or nothing."""


class History:
    """All actions of a program, and the positions of some of them."""

    def __init__(self) -> None:
        """Begin without actions."""
        self.actions = list[Action]()
        self.saved_at = 0
        """Number of actions before the last operator that saves something."""
        self.outputs_of_saver: tuple[Store, ...] = ()
        """Outputs of that operator. The tape allocates them before the operator saves, torch after it."""
        self.outgoing: Store | None = None
        """The gradient of the program's input, after the backward."""
        self.waiting_at_rerun: tuple[Store, ...] = ()
        """Gradients that wait when the backward first needs a saved tensor, which is when a checkpoint recomputes."""
        self.rerun_at = 0
        """Number of actions before the recomputation."""
        self.moments_before_rerun = 0
        self.handed: tuple[Store, ...] = ()
        """Tensors that layers above read too, and that a variable of the model's forward holds."""
        self.beneath: tuple[Store, ...] = ()
        """These, and what autograd saved to make them."""
        self.leaving: tuple[Store, ...] = ()
        """What is alive when the backward is done but for gradients of tensors that all layers read."""
        self.input_copies = list[Store]()
        """Copies of a block's inputs other than the residual stream, which the engine makes before any checkpoint."""
        self.in_nodes = list[Store]()
        """Tensors that are attributes of autograd's nodes. No hook of a checkpoint or an offload sees them."""


class Alive(NamedTuple):
    """A moment: the live tensors, elements of weight gradients made so far and being made, and live autocast copies of weights."""

    name: str
    stores: tuple[Store, ...]
    gradients: tuple[Size, ...]
    current: tuple[Size, ...]
    casts: tuple[Size, ...]
    place: Place = Place()
    before: tuple[Store, ...] = ()
    """Tensors alive before the operator, or its module, allocates anything. Recorded only if engines need it."""


class Arrival(NamedTuple):
    """An operator's weight gradients reach their weights: all gradients so far, and the tensors alive after the operator."""

    gradients: tuple[Size, ...]
    stores: tuple[Store, ...]


class WeightGradients:
    """The weight gradients of a backward so far. Sizes are elements."""

    def __init__(self) -> None:
        """Start without gradients."""
        self.made: list[Size] = []
        self.current: list[Size] = []
        """Those that the current operator made."""
        self.waiting: list[Size] = []
        """Those that have not reached their weights yet."""
        self.arrivals: list[Arrival] = []

    def add(self, size: Size, *, waits: bool) -> None:
        """Add a gradient. ``waits``: it does not reach its weight yet."""
        self.made.append(size)
        self.current.append(size)
        if waits:
            self.waiting.append(size)


class Selected:
    """The tensors that a selective checkpoint keeps: every second plain matrix product, and attention's output."""

    def __init__(self, *, keeps: bool) -> None:
        """``keeps``: a selective checkpoint runs."""
        self.keeps = keeps
        self.products: list[Store] = []
        """Outputs of plain matrix products, in order."""
        self.kernel_outputs: list[Store] = []
        """Outputs of attention's kernel."""

    def stores(self) -> tuple[Store, ...]:
        """Return the kept tensors."""
        return with_twins((*self.products[::2], *self.kernel_outputs))


class OnDemand:
    """How a backward makes again what its checkpoint did not keep, as a compiled graph does: each tensor when it needs it first.

    Source: torch 2.13, _functorch/partitioners.py, ``reordering_to_mimic_autograd_engine``.
    """

    def __init__(self) -> None:
        """Begin without tensors."""
        self.made_from = dict[Store, tuple[Store, ...]]()
        """What an operator reads to make a tensor."""
        self.apart = set[Store]()
        """Kept tensors that no operator saves: their first use frees them."""
        self.scaled = set[Store]()
        """Inputs of products in float8 whose scales per row are kept."""
        self.in_four_bits = dict[Store, Store]()
        """The NVFP4 codes, by columns, of inputs of products."""

    def learn(self, outputs: tuple[Value, ...], of: tuple[Value, ...] | None, saved: Saved) -> None:
        """Remember the inputs of an operator: ``of``, or the tensors of others that it saves."""
        made = {one.store for one in outputs}
        read = [one for one in saved if isinstance(one, Value)] if of is None else of
        inputs = tuple([one.store for one in read if one.store not in made])
        for store in (*made, *(one for one in saved if isinstance(one, Store))):
            if store not in inputs:
                self.made_from.setdefault(store, inputs)


class Tape:
    """A program's run so far."""

    in_fp8: Literal["", "delayed", "current"] = ""
    """Matrices multiply in FP8, with scales of before or of their own tensors."""
    untracked: set[Value]
    """Tensors that autograd does not follow."""
    in_parts: set[Value]
    """Tensors whose gradients from several operators stay apart until the backward ends, as in a compiled block."""
    held: list[Store]
    """What lives until the backward ends."""
    of_others: set[Value]
    """Tensors that other layers make, or read too."""
    arriving: dict[Value, Store]
    """Gradients that layers above have begun; those of the program's operators are added."""
    left: list[Store]
    """Other tensors that layers above have left in memory."""
    lasting: set[int]
    """The operators, by ``id``, whose weights' autocast copies outlive them."""
    rows: Size
    """The rows of the inputs of linear layers: the tokens, or those of images to which a layer attends."""
    summed_anew: set[Value]
    """Tensors whose gradients autograd never adds in place: DTensors, like all tensor subclasses."""
    deferred: list[Deferred]
    """Operators in the order in which the first half of a backward ran them."""
    module: Module
    """The module whose forward runs, if engines need to know it."""
    casts: list[Size]
    """Elements of the weights whose autocast copies live to the backward."""
    cached: list[Size]
    """Elements of the weights whose copies autocast caches until its context ends."""
    alive_at_forward: dict[Module, tuple[Store, ...]]
    """Tensors alive when a module's forward began, for the modules that engines need to know."""
    alive_at_backward: dict[Module, tuple[Store, ...]]
    """Tensors alive when a module's backward began, for the same modules."""
    scratch: list[Store]
    """Temporaries of the running operator."""
    before: tuple[Store, ...]
    """Tensors alive when the operator began, if engines need them."""
    freed: bool
    """Something was freed since the last moment."""
    _last_saver: tuple[int, Alive, tuple[Value, ...]]
    """The last operator that saved something: the number of moments before it, its moment, and its unsaved outputs."""
    _last_linear: Module
    """The linear layer whose backward ran last."""

    def __init__(
        self, *, wide: bool, autocast: bool, saving: bool, narrow: bool = False, keeps_selected: bool = False,
        recomputed: bool = False, marking: bool = False, fused_softmax: bool = False, offloading: bool = False,
        on_demand: bool = False, brief: bool = False,
    ) -> None:  # fmt: skip
        """``wide``: the compute dtype is fp32. ``saving``: operators save tensors, as they do outside a checkpoint.

        ``narrow``: weights and residual stream have the compute dtype even under autocast. ``keeps_selected``: a selective
        checkpoint keeps tensors. ``recomputed``: a recomputation saved the tensors, and the backward frees each right after it
        reads it. ``marking``: the history marks modules with weights.
        ``fused_softmax``: a softmax in fp32 reads 16 bits itself. ``offloading``: autograd copies every saved tensor to host
        memory, once per operator that saves it, and copies it back for the operator's backward. ``on_demand``: the backward makes
        each tensor that the checkpoint did not keep when it first needs it. ``brief``: only the highest moments count, so that
        a program may leave out repetitions.
        """
        self.demand = OnDemand() if on_demand else None
        self.selected, self.recomputed, self.brief = Selected(keeps=keeps_selected), recomputed, brief
        self.marks, self.host = Marks() if marking else None, InHost() if offloading else None
        self.wide, self.autocast, self.saving, self.fused_softmax = wide, autocast, saving, fused_softmax
        self.wide_residual = autocast and not narrow
        self.mode, self.half, self.module = Mode(), Half.WHOLE, Module.NONE
        self.untracked, self.summed_anew, self.deferred = set(), set(), []
        self.in_parts, self.held, self.rows = set(), [], T
        self.arriving, self.left, self.of_others, self.lasting = {}, [], set(), set()
        self.alive: dict[Store, None] = {}
        self.saved: dict[Store, None] = {}
        self.operators: list[Operator] = []
        self.moments: list[Alive] = []
        self.history, self.gradients, self.casts, self.cached = History(), WeightGradients(), [], []
        self.alive_at_forward, self.alive_at_backward, self.scratch = {}, {}, []
        self.name, self.place, self.before, self.freed = "", Place(), (), True
        self._within: tuple[Part, ...] = ()
        self._last_saver, self._last_linear = (0, Alive("", (), (), (), ()), ()), Module.NONE

    def is_wide(self, dtype: Width) -> bool:
        """Whether a dtype is fp32 in this run."""
        return dtype == 4 or self.wide or (dtype == r and self.wide_residual) or (dtype == CAST_BY_CUDA and self.autocast)

    def in_this_run(self, size: Size) -> Size:
        """Return a size with the symbols that only the tape knows replaced."""
        if size.has(P_own):
            size = size.replacing({P_own.text: X_r if self.mode.uneven else T_own * t})
        if size.has(h_own):
            size = size.replacing({h_own.text: X if self.mode.latent_experts else h})
        if size.has(T_own):
            size = size.replacing({T_own.text: T_p if self.mode.sharded else T})
        return size.replacing({CAST_BY_CUDA.text: 4 if self.autocast else e}) if size.has(CAST_BY_CUDA) else size

    # --- memory --------------------------------------------------------------------------------------------------------------

    def make(self, kind: Kind, reason: str, size: Size, source: str, tag: Tag = PLAIN) -> Store:
        """Allocate a tensor and record the moment. Autocast runs ``pow`` in fp32 on CUDA only."""
        if self.autocast and size.has(CAST_BY_CUDA):
            reason, tag = f"{reason}, fp32 under CUDA's autocast", tag._replace(off_gpu=OffGpu.HALF)
        size = self.in_this_run(size)
        if self.module and not tag.module:
            tag = tag._replace(module=self.module)
        store = Store(kind, reason, size, source, tag)
        for part in self._within:
            part.stores.add(store)
        self.alive[store] = None
        self.history.actions.append((Do.REQUEST, store))
        self.record()
        return store

    def send(self, *exchanges: Exchange) -> None:
        """Record collectives. Their buffers are requested separately."""
        self.history.actions += [(Do.SEND, one._replace(size=self.in_this_run(one.size))) for one in exchanges]

    def record(self) -> None:
        """Record the live tensors as a moment. It replaces the last one if nothing was freed since, because that was lower."""
        made, making = tuple(self.gradients.made), tuple(self.gradients.current)
        moment = Alive(
            self.name, tuple(self.alive), made, making, (*self.casts, *self.cached), place=self.place, before=self.before
        )
        if not self.freed:
            self.moments.pop()
        self.moments.append(moment)
        self.freed = False

    def hold(self, store: Store) -> Store:
        """Add a holder."""
        store.holds += 1
        return store

    def drop(self, *stores: Store) -> None:
        """Remove a holder of each store; free the stores without holders."""
        for store in stores:
            store.holds -= 1
            if not store.holds and store in self.alive:
                self._free(store)

    def _free(self, store: Store) -> None:
        del self.alive[store]
        self.history.actions.append((Do.RELEASE, store))
        self.freed = True

    def with_weight(self, *inputs: Value) -> tuple[Value, ...] | None:
        """Return ``of`` of an operator with a weight: None if the weight is trained, else its other inputs."""
        return inputs if self.mode.weights_frozen else None

    def release(self, *values: Value | None) -> None:
        """End the variables that hold some tensors. None: the variable holds no tensor."""
        for value in values:
            if value is None:
                continue
            self.drop(value.store)
            if value.store.twin is not None:
                self.drop(value.store.twin)
            if value.copy is not None:
                self.drop(value.copy)
                value.copy = None

    def temporary(
        self, reason: str, size: Size, source: str, tag: Tag = PLAIN, *, pieces: int = 1, kind: Kind = Kind.TEMPORARY
    ) -> Store:
        """Allocate a tensor that is freed when the operator ends."""
        store = self.make(kind, reason, size, source, tag)
        store.pieces = pieces
        self.scratch.append(store)
        return store

    def begin_brief(self, reason: str, size: Size, source: str) -> Store:
        """Allocate a tensor that only requests show: a later moment of the same operator is at least as high."""
        store = Store(Kind.TEMPORARY, reason, self.in_this_run(size), source, PLAIN)
        self.history.actions.append((Do.REQUEST, store))
        return store

    def end_brief(self, store: Store) -> None:
        """Free a tensor of :meth:`begin_brief`."""
        self.history.actions.append((Do.RELEASE, store))

    def split_by_batch(self, store: Store) -> None:
        """Split a tensor in two: a single sequence's, which a product saves, and several sequences', which it copies.

        Of a tensor of another layer only the copy counts.
        """
        if store not in self.alive:
            return
        whole, holders = store.size, store.holds
        store.size = whole * at_least(0, 2 - b)
        store.twin = Store(store.kind, store.reason, whole * at_most(1, b - 1), store.source, store.tag)
        store.twin.holds = holders
        self.alive[store.twin] = None
        actions = self.history.actions
        actions.insert(actions.index((Do.REQUEST, store)), (Do.REQUEST, store.twin))
        self.moments = [_with_twin(moment, store) for moment in self.moments]
        before, last, outputs = self._last_saver
        self._last_saver = before, _with_twin(last, store), outputs

    # --- the forward ---------------------------------------------------------------------------------------------------------

    def follows(self, *values: Value) -> bool:
        """Whether autograd tracks one of these tensors, and this backward makes input gradients."""
        return self.half is not Half.WEIGHTS and not self.untracked.issuperset(values)

    @property
    def offloading(self) -> bool:
        """Whether saved tensors move to host memory."""
        return self.host is not None

    @property
    def keeps_saved(self) -> bool:
        """Whether saved tensors stay on the GPU."""
        return self.saving and not self.offloading

    def add(
        self, name: str, outputs: tuple[Value, ...], saved: Saved, backward: Backward, *,
        of: tuple[Value, ...] | None, cast: Size | None = None, place: Place | None = None, late: bool = False,
        saves_weight: bool = False, beside: tuple[Beside, ...] = (), strided: tuple[Value, ...] = (),
    ) -> None:  # fmt: skip
        """Add an operator to the graph. It holds its saved tensors until its backward is done.

        ``of``: its inputs; None if it has a trained weight. Autograd skips the operator if it tracks none of its inputs.
        ``late``: the operator saves after it computes; torch's own save before. ``beside``: saved tensors that the block does
        not own. ``strided``: those of ``saved`` that are views whose order differs from that of memory.
        """
        if of is not None and not self.follows(*of):
            self.untracked.update(outputs)
            return
        if self.demand is not None:
            self.demand.learn(outputs, of, saved)
        stores = tuple([one.store if isinstance(one, Value) else one for one in saved])
        on_host = () if self.host is None else self._packed(self.host, saved, beside, outputs, strided)
        kept, cast = (stores, cast) if self.keeps_saved else ((), None if self.offloading else cast)
        for store in kept:
            self.hold(store)
            self.saved[store] = None
        if kept or (saves_weight and self.saving):
            apart = () if late else tuple(value for value in outputs if value.store not in kept)
            self._last_saver = len(self.moments) - 1, self.moments[-1], apart
            self.history.saved_at = len(self.history.actions)
            self.history.outputs_of_saver = tuple([value.store for value in apart])
        self.operators.append(
            Operator(
                name, outputs, kept, backward, cast, saves_weight, place or Place(), self.module, of is None, self._owners, on_host
            )
        )  # fmt: skip

    def _packed(
        self, host: InHost, saved: Saved, beside: tuple[Beside, ...], outputs: tuple[Value, ...], strided: tuple[Value, ...]
    ) -> tuple[Store, ...]:
        """Return the host copies that an operator's backward reads, and record the GPU memory that making them needs.

        A strided view is first copied on the GPU; an operand is copied before the operator allocates its outputs. Source: torch
        2.13, aten/src/ATen/native/cuda/Copy.cu, copy_requires_temporaries.
        """
        there = list(self.alive)
        made = there[min((there.index(value.store) for value in outputs if value.store in self.alive), default=len(there)) :]
        copies = list[Store]()
        for one in (*saved, *beside):
            if isinstance(one, Beside):
                reason, size, in_order, is_output = one.reason, one.size, not one.strided, False
            else:
                store = one.store if isinstance(one, Value) else one
                size = one.dtype * one.shape if isinstance(one, Value) else store.size
                is_strided = one in strided or (isinstance(one, Value) and one.strided)
                reason, in_order, is_output = store.reason, not is_strided, store in made
            copy = Store(Kind.ACTIVATIONS, reason, self.in_this_run(size), SAVED_ON_CPU)
            host.copies.append(copy)
            if not (isinstance(one, Beside) and one.brief):
                copies.append(copy)
            if not in_order:
                self._in_order(copy, () if is_output else tuple(made))
        return tuple(copies)

    def _in_order(self, copy: Store, not_yet: tuple[Store, ...]) -> None:
        """Allocate a contiguous copy for a moment, before the tensors ``not_yet`` are allocated."""
        there, actions = self.alive.copy(), self.history.actions
        at = min((actions.index((Do.REQUEST, store)) for store in not_yet), default=len(actions))
        later = actions[at:]
        del actions[at:]
        for store in not_yet:
            del self.alive[store]
        self.freed = True
        reason = f"{copy.reason}, copied on its way to host memory"
        self.drop(self.make(Kind.TEMPORARY, reason, copy.size, ON_ITS_WAY, CUDA_ALONE))
        self.alive = there
        actions += later

    @property
    def _owners(self) -> tuple[Owner, ...]:
        return () if self.marks is None else self.marks.owners

    @contextmanager
    def owning(self, *, leaf: bool = False) -> Iterator[None]:
        """Assign operators added inside to a module with weights. A ``leaf`` also owns the operators of the modules inside it."""
        marks = self.marks
        if marks is None or marks.in_leaf:
            yield
            return
        owner, around = Owner(), marks.owners
        marks.owners, marks.in_leaf = (*around, owner), leaf
        self.history.actions.append((Do.ENTER, owner))
        yield
        self.history.actions.append((Do.LEAVE, owner))
        marks.owners, marks.in_leaf = around, False

    @contextmanager
    def inside(self, module: Module) -> Iterator[None]:
        """Tag tensors allocated inside as ``module``'s."""
        self.alive_at_forward[module], self.module = tuple(self.alive), module
        yield
        self.module = Module.NONE

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """Count the tensors allocated inside as a part's. :meth:`end` says where the part's backward begins."""
        around = self._within
        self._within = (*around, part)
        yield
        self._within = around

    def end(self, part: Part, *outputs: Value) -> None:
        """Say that the backward of the last operator needs a part's tensors. ``outputs`` do not belong to it."""
        part.stores.difference_update([one.store for one in outputs])
        self.operators[-1] = self.operators[-1]._replace(needs=(*self.operators[-1].needs, part))

    def moments_until_last_saved(self) -> list[Alive]:
        """Return the moments up to the last operator that saves, where a recomputation stops (``early_stop``)."""
        before, last, outputs = self._last_saver
        made = [value.store for value in outputs]
        return [*self.moments[:before], last._replace(stores=tuple(store for store in last.stores if store not in made))]

    def hold_cast(self, elements: Size) -> None:
        """Make an autocast copy of a weight that lives to the backward; the engine counts its bytes."""
        self.casts.append(elements)
        self.history.actions.append((Do.CAST, elements))

    def matrix_product(self, made: Store) -> None:
        """Record the output of a plain matrix product. A selective checkpoint keeps the first, the third, and so on."""
        if self.mode.keeps:
            return
        if self.selected.keeps and len(self.selected.products) % 2 == 0:
            self.hold(made)
        self.selected.products.append(made)

    def forget_last_product(self) -> None:
        """Let go of the block's last product: only the block's output needs it, and a compiled graph keeps none such."""
        if not self.selected.products:  # all of them are in NVFP4
            return
        if self.selected.keeps and len(self.selected.products) % 2:
            self.drop(self.selected.products[-1])
        self.selected.products.pop()

    def kernel_output(self, *made: Store, of: str = "") -> None:
        """Record outputs of attention's kernel, or the tensors that mode ``of`` keeps, which a selective checkpoint keeps."""
        if self.mode.keeps != of:
            return
        if self.selected.keeps:
            for store in made:
                self.hold(store)
        self.selected.kernel_outputs += made

    # --- the backward --------------------------------------------------------------------------------------------------------

    def hold_in_node(self, store: Store) -> None:
        """Keep a tensor that an operator of Python stores on its node, beside its saved tensors, until the backward ends."""
        if store in self.history.in_nodes or self.demand is not None:
            return
        self.history.in_nodes.append(store)
        self.hold_to_the_end(store)
        if self.keeps_saved:
            self.saved[store] = None

    def checkpoint_of(self, given: Store) -> tuple[Store, ...]:
        """Return what a full checkpoint of a block keeps: its inputs, and what nodes hold."""
        return (given, *self.history.input_copies, *self.history.in_nodes)

    def end_nodes(self) -> None:
        """Release what nodes hold: those of a recomputation go with its graph, when it ends."""
        for store in self.history.in_nodes:
            self.held.remove(store)
            self.saved.pop(store, None)
        self.drop(*self.history.in_nodes)

    def used(self, *stores: Store) -> None:
        """Record the moment. After a recomputation, free the tensors just read, except a checkpoint's input."""
        self.record()
        self.read()
        for store in stores if self.recomputed else ():
            if store.holds == 1 and store in self.alive and store.tag.role is not Role.BLOCK_INPUT:
                self._free(store)

    def read(self) -> None:
        """Free the copies from host memory that an operator has read. Autograd sums over broadcast dimensions only afterwards."""
        if self.host is not None:
            self.drop(*self.host.back)
            self.host.back.clear()

    def weight_gradient(
        self, size: Size, *, waits: bool = False, unsummed: tuple[str, Size, str] | None = None, read: tuple[Store, ...] = (),
        uncast: tuple[str, Size, str] | None = None,
    ) -> None:  # fmt: skip
        """Make a weight's gradient of ``size`` elements, which the engine takes over.

        ``waits``: it reaches the weight only after the backward of operators that ran earlier. ``unsummed``: the tensor whose
        sum is the gradient (reason, size, source). By then the operator no longer needs the tensors that it has ``read``.
        ``uncast``: that sum, where it is the gradient of a wider copy of the weight; a later operator casts it.
        """
        if self.half is Half.INPUTS:
            return
        size = self.in_this_run(size)
        if unsummed is not None:
            terms = self.temporary(*unsummed)
            self.used(*read)
            if uncast is not None:
                self.temporary(*uncast)
                self.scratch.remove(terms)
                self.drop(terms)
        self.gradients.add(size, waits=waits)
        self.history.actions.append((Do.GRADIENT, size))

    def run_backward(self, output: Value, incoming: Store) -> None:
        """Run the backward from ``incoming``, the gradient of ``output``."""
        self.moments.clear()
        self.cached.clear()
        self.freed = True
        if self.demand is not None:
            self._leave_the_kept(self.demand)
        if incoming.size.terms:
            self.alive[incoming] = None
            if self.demand is not None:  # the compiler may move the products of weight gradients to the graph's end
                self.hold_to_the_end(incoming)
        self.drop(*with_twins(self.history.handed))
        self.alive |= dict.fromkeys((*self.arriving.values(), *self.left))
        waiting: dict[Value, Store] = {output: incoming, **self.arriving}
        for operator in reversed(self.operators):
            if operator.outputs and all(value in waiting for value in operator.outputs):
                self._return_to(operator)
                if (operator.saved or operator.saves_weight) and not self.history.waiting_at_rerun:
                    self.history.waiting_at_rerun = (*dict.fromkeys(waiting.values()), *self.left)
                    self.history.rerun_at = len(self.history.actions)
                    # The next moment replaces the last one if nothing is freed.
                    self.history.moments_before_rerun = len(self.moments) - (not self.freed)
                self._step(operator, waiting)
        self.history.outgoing = next((store for value, store in waiting.items() if value not in self.of_others), None)
        if self.of_others and not self.history.leaving:
            self.history.leaving = tuple(self.alive)
        self.drop(*self.held)

    def _leave_the_kept(self, demand: OnDemand) -> None:
        """Let go of what the checkpoint did not keep. What is not to be made again counts as saved by its operator alone."""
        kept = self.selected.stores() if self.selected.keeps else ()
        demand.apart = {store for store in kept if store not in self.saved}
        self.drop(*(store for store in kept if store in self.saved))
        for store in [one for one in self.alive if one not in kept and one.tag.role is not Role.BLOCK_INPUT]:
            self._free(store)

    def _make_again(self, store: Store, demand: OnDemand) -> None:
        """Make a tensor again from what is alive, and first what it is made from."""
        if store in self.alive:
            return
        inputs = demand.made_from[store]
        for one in inputs:
            self._make_again(one, demand)
        self.name, self.place = f"recomputed: {store.reason}", Place(At.RUN_AGAIN, store.tag.module)
        self.alive[store] = None
        self.history.actions.append((Do.REQUEST, store))
        self.record()
        self.drop(*(one for one in inputs if one in demand.apart))
        demand.apart.difference_update(inputs)
        for one in [one for one in inputs if not one.holds and one in self.alive]:
            self._free(one)

    def hold_to_the_end(self, *stores: Store) -> None:
        """Keep tensors until the backward ends."""
        self.held += [self.hold(store) for store in stores]

    def _return_to(self, operator: Operator) -> None:
        if self.marks is not None:
            self.history.actions += [(Do.RETURN, owner) for owner in operator.owners if owner not in self.marks.returned]
            self.marks.returned.update(operator.owners)

    def _done(self, operator: Operator) -> None:
        """Record the end of the backward of modules whose first forward operator this is."""
        before = self.operators[: self.operators.index(operator)] if operator.owners else ()
        earlier = {owner for one in before for owner in one.owners}
        self.history.actions += [(Do.DONE, owner) for owner in reversed(operator.owners) if owner not in earlier]

    def _step(self, operator: Operator, waiting: dict[Value, Store]) -> None:
        if self.demand is not None:
            for store in operator.saved:
                self._make_again(store, self.demand)
        self._begin(operator)
        grad_outputs = [waiting.pop(value) for value in operator.outputs]
        if self.host is not None:
            self.host.back += [
                self.make(one.kind, f"{one.reason}, back from host memory", one.size, SAVED_ON_CPU) for one in operator.on_host
            ]
        arriving = operator.backward(self, grad_outputs)
        self.record()
        gradients = self.gradients
        made = len(gradients.current) > len(gradients.waiting)
        self.read()
        self.drop(*self.scratch, *self._done_with(operator, grad_outputs))
        self.scratch.clear()
        # Engines look up the moment of the loss, so no later moment may replace it.
        self.freed = self.freed or bool(gradients.current) or operator.place.at is At.LOSS
        gradients.current[:] = gradients.waiting
        if operator.cast is not None and id(operator) not in self.lasting:
            self.freed = True
            self.casts.remove(operator.cast)
            self.history.actions.append((Do.UNCAST, operator.cast))
        if made and self.marks is not None:
            self.history.actions.append((Do.ARRIVE, None))
        self._done(operator)
        for value, arrived in arriving:
            self._deliver(value, arrived, waiting)
        if made:
            self.history.actions += [] if self.marks is not None else [(Do.ARRIVE, None)]
            gradients.arrivals.append(Arrival(tuple(gradients.made), tuple(self.alive)))

    def _begin(self, operator: Operator) -> None:
        self.name, self.place = operator.name, operator.place
        for part in operator.needs:
            part.since = len(self.moments) - (not self.freed)
        if self.place.at is At.LINEAR:
            self._last_linear = self.place.module
        elif self.place.at is At.ANYWHERE:
            self.place = Place(At.BETWEEN, self._last_linear)
        reached = self.alive_at_backward.setdefault(operator.module, tuple(self.alive))
        gathered = self.place.at in (At.LINEAR, At.HEAD, At.FINAL_NORM)
        self.before = tuple(self.alive) if gathered else reached if self.place.at is At.WEIGHTING else ()

    def _done_with(self, operator: Operator, grad_outputs: list[Store]) -> tuple[Store, ...]:
        """Return the tensors to free: the operator's output gradients and its saved tensors, unless a second half needs them."""
        if self.half is Half.WHOLE:
            return (*grad_outputs, *operator.saved)
        if not operator.has_weight:
            return tuple(grad_outputs)
        self.deferred.append(Deferred(operator, tuple(grad_outputs)))
        return ()

    def _deliver(self, value: Value, gradient: Store, waiting: dict[Value, Store]) -> None:
        """Add a gradient to a waiting one: in place if nothing else holds that one's memory.

        Source: torch 2.13, csrc/autograd/input_buffer.cpp, ``can_accumulate_inplace``.
        """
        if value in self.untracked:
            self.drop(gradient)
            return
        first = waiting.get(value)
        if first is None:
            waiting[value] = gradient
            return
        if value in self.in_parts:
            self.held.append(gradient)
            return
        if first.holds == 1 and not first.is_view and value not in self.summed_anew:
            self.drop(gradient)
            return
        waiting[value] = self.make(first.kind, first.reason, first.size, first.source, first.tag)
        self.drop(first, gradient)

    def run_to_inputs(self, output: Value, incoming: Store) -> None:
        """Run the first half of a backward, which makes input gradients only. :meth:`run_weights` makes the weight gradients."""
        self.half = Half.INPUTS
        self.run_backward(output, incoming)

    def run_weights(self, deferred: Deferred) -> tuple[tuple[Store, ...], tuple[Store, ...]]:
        """Make an operator's weight gradients in the second half. Return its temporaries, and the tensors freed afterwards."""
        self.half = Half.WEIGHTS
        deferred.operator.backward(self, list(deferred.taken))
        beside = tuple(self.scratch)
        self.drop(*self.scratch)
        self.scratch.clear()
        before = tuple(self.alive)
        self.drop(*deferred.taken, *deferred.operator.saved)
        return beside, tuple([store for store in before if store not in self.alive])


def with_twins(stores: tuple[Store, ...]) -> tuple[Store, ...]:
    """Return the tensors, and the second parts of those that are split."""
    return tuple([one for store in stores for one in (store, store.twin) if one is not None])


def _with_twin(moment: Alive, store: Store) -> Alive:
    """Return the moment with the second part of a split tensor beside the first."""
    if store.twin is None or store not in moment.stores:
        return moment
    return moment._replace(stores=(*moment.stores, store.twin))
