"""The memory of a traced module, as data: the file that ``zeroplan profile`` writes and ``--profile`` reads."""

from itertools import chain
from typing import Annotated, Literal

from zeroplan.errors import SpecError
from zeroplan.spec.base import Count, CountOrZero, Dimension, Range, Spec
from zeroplan.spec.hardware import Kernels
from zeroplan.spec.model import ModelSpec, Profiled
from zeroplan.spec.recipe import Attention, Recompute

SCHEMA_VERSION: Literal[2] = 2

Coefficient = Annotated[int, Range(-(10**15), 10**15)]


class Amount(Spec):
    """A polynomial in tokens and sequences, which gives the bytes for any batch.

    ``micro_batch`` is per sequence, ``seq_len`` per position of one sequence, ``tokens`` per token, ``seq_len_squared`` per
    pair of positions, ``tokens_seq_len`` per pair in every sequence; ``padding`` is per position that pads a sequence to a
    multiple of ``seq_multiple``.
    """

    constant: Coefficient = 0
    micro_batch: Coefficient = 0
    seq_len: Coefficient = 0
    tokens: Coefficient = 0
    seq_len_squared: Coefficient = 0
    tokens_seq_len: Coefficient = 0
    padding: Coefficient = 0


class Tensor(Spec):
    """One parameter; ``autocast``: ``torch.autocast`` makes a 16-bit copy of it; ``frozen``: it gets no gradient."""

    name: str
    shape: tuple[Dimension, ...]
    autocast: bool = False
    frozen: bool = False


class Part(Spec):
    """Saved tensors, and the operator that makes them."""

    reason: str
    amount: Amount


class Flash(Spec):
    """A flash-attention kernel that runs in a backward: its heads, their size, the key/value heads.

    ``queries``: the queries of each sequence, if not its tokens: a text joins a picture, an encoder has its own length.
    """

    heads: Dimension
    head_dim: Dimension
    kv_heads: Dimension
    queries: CountOrZero = 0


class Point(Spec):
    """A moment of the backward where memory can peak.

    ``saved``: tensors still saved from the forward; ``working``: gradients and temporaries; ``gradients``, ``current`` and
    ``casts`` count elements as in :class:`zeroplan.transformer.blocks.BackwardPoint`.
    """

    name: str
    saved: Amount
    working: Amount
    gradients: CountOrZero = 0
    current: CountOrZero = 0
    casts: CountOrZero = 0
    flash: Flash | None = None

    def check_rules(self) -> None:
        """Raise SpecError if the gradient being computed has more elements than all gradients."""
        if self.current > self.gradients:
            raise SpecError(
                f"point {self.name!r} of the profile has current={self.current:,}, more than its gradients={self.gradients:,}; "
                "trace the module again with zeroplan profile"
            )


class GradientArrival(Spec):
    """The moment when a weight's gradient is ready, in autograd's order, with the bytes alive as in :class:`Point`."""

    name: str
    saved: Amount
    working: Amount


class Multiplied(Spec):
    """Floating-point operations of one forward, for any batch: matrix products, and attention kernels. [FLOPs]"""

    matrices: Amount = Amount()
    attention: Amount = Amount()


class ProfiledBlock(Spec):
    """One kind of block in one :class:`Variant`: its input, its saved tensors, and the moments where memory can peak.

    ``forward``: candidates for the highest total beyond ``kept`` in its forward. ``operations``: None if not counted, or if
    no polynomial fits them.
    """

    input: Amount
    kept: tuple[Part, ...]
    forward: tuple[Amount, ...]
    points: tuple[Point, ...]
    handed: tuple[GradientArrival, ...]
    cast_elements: CountOrZero = 0
    operations: Multiplied | None = None


class ProfiledPass(Spec):
    """A whole forward and backward: every kind of block, and everything outside the blocks.

    ``shared``: alive from before the first block to the end; ``beside``: alive while blocks run forward; ``first_input``: the
    first block's input if a variable holds it; ``loss``: between the last block and the backward; ``head``: moments from the
    loss's backward to the last block's; ``last``: after the first block's backward. Each of these lists candidates for the
    largest. ``seq_multiple``: kernels pad lengths to a multiple of it. Other lengths than multiples of ``counted_by`` run
    other operators; they count as the next multiple. ``remarks``: what is not exact. ``operations``: those outside the blocks.
    """

    seq_multiple: Annotated[int, Range(1, 4096)] = 1
    counted_by: Annotated[int, Range(1, 4096)] = 1
    remarks: tuple[str, ...] = ()
    blocks: dict[str, ProfiledBlock]
    shared: tuple[Part, ...]
    beside: tuple[Part, ...]
    first_input: Amount
    loss: tuple[Amount, ...]
    output: Amount
    head: tuple[Point, ...]
    head_handed: tuple[GradientArrival, ...]
    last: tuple[Amount, ...]
    last_handed: tuple[GradientArrival, ...]
    operations: Multiplied | None = None


class Variant(Spec):
    """One combination of precision, kernels and recomputation. Some modules handle a single sequence (``one``) differently."""

    element_bytes: Literal[2, 4]
    autocast: bool
    kernels: Kernels
    recompute: Recompute
    one: ProfiledPass
    more: ProfiledPass


class Run(Spec):
    """Consecutive blocks of one kind."""

    kind: str
    layers: Count


class Modules(Spec):
    """Modules in forward order: those that contain the blocks, those before and after, and those inside each kind of block.

    The outputs of ``unfollowed`` modules get no gradients, and neither do the inputs of ``unnoticed`` ones. ``tied`` is the module
    after the blocks that shares an embedding's weight.
    """

    holding: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    kinds: dict[str, tuple[str, ...]]
    unfollowed: tuple[str, ...] = ()
    unnoticed: tuple[str, ...] = ()
    tied: str | None = None


class Profile(Profiled):
    """A traced module.

    ``source``: what was traced; ``embeddings``: parameters outside the blocks whose gradients come last; ``tail``: the others
    outside; ``tied_head``: the embedding that is also the head; ``order``: both as the module registers them, with an empty
    name for the blocks; ``kinds``: the parameters of one block of each kind. ``seq_len`` is set if the length is fixed;
    ``inputs``: floating-point inputs of one sequence, in fp32, which the training loop holds through the step [bytes];
    ``shortest``: shorter sequences were not traced; ``longest``: the longest sequence in the module's configuration.
    """

    schema_version: Literal[2] = 2
    name: str
    source: str
    packages: dict[str, str]
    attention: Attention = "sdpa"
    embeddings: tuple[Tensor, ...]
    runs: tuple[Run, ...]
    kinds: dict[str, tuple[Tensor, ...]]
    tail: tuple[Tensor, ...]
    order: tuple[str, ...]
    modules: Modules
    tied_head: str | None = None
    buffer_bytes: CountOrZero = 0
    attribute_bytes: CountOrZero = 0
    """Tensors that modules hold as plain attributes, which no engine knows. [bytes]"""
    inputs: CountOrZero = 0
    seq_len: Count | None = None
    shortest: Count = 1
    longest: Count | None = None
    variants: tuple[Variant, ...]

    def __hash__(self) -> int:
        """Hash without the tables: a dict has no hash, and the name distinguishes most profiles."""
        return hash((self.name, self.source, len(self.variants)))

    def check_rules(self) -> None:
        """Raise SpecError for a profile with inconsistent parts."""
        if not self.runs or not self.variants:
            raise SpecError("a profile has at least one block and one variant")
        kinds = {run.kind for run in self.runs}
        if kinds != set(self.kinds):
            raise SpecError(f"the profile's runs are of {', '.join(sorted(kinds))}, its kinds {', '.join(sorted(self.kinds))}")
        for kind in kinds:
            if not kind.isidentifier():
                raise SpecError(f"kind {kind!r} is not a name, which formulas need")
        for one in (part for variant in self.variants for part in (variant.one, variant.more)):
            if set(one.blocks) != kinds or not (one.loss and one.head and one.last):
                raise SpecError(
                    "a variant of the profile lacks a kind of block, its loss, its head or what is below the blocks"
                )
        _check_order(self)
        if self.tied_head is not None and self.tied_head not in {tensor.name for tensor in self.embeddings}:
            raise SpecError(f"tied_head {self.tied_head!r} is none of the profile's embeddings")

    @property
    def has_frozen(self) -> bool:
        """Whether the module freezes some parameters itself, as Whisper its positions."""
        return any(tensor.frozen for tensor in (*self.embeddings, *self.tail, *chain(*self.kinds.values())))

    @property
    def trains_adapters(self) -> bool:
        """Whether the first block has frozen weights and trained ones beside them."""
        return len({tensor.frozen for tensor in self.kinds[self.runs[0].kind]}) > 1


def _check_order(profile: Profile) -> None:
    """Raise SpecError for a profile without the order of parameters or of gradients."""
    if set(profile.modules.kinds) != set(profile.kinds):
        raise SpecError("the profile does not name the modules of each kind of block")
    outside = [tensor.name for tensor in (*profile.embeddings, *profile.tail)]
    if sorted(profile.order) != sorted(["", *outside]):
        raise SpecError("the profile's order does not name each parameter outside the blocks once, and the blocks")
    for one in (part for variant in profile.variants for part in (variant.one, variant.more)):
        for named, arrivals in (
            (profile.embeddings, one.last_handed),
            (profile.tail, one.head_handed),
            *((profile.kinds[kind], block.handed) for kind, block in one.blocks.items()),
        ):
            if sorted(each.name for each in arrivals) != sorted(tensor.name for tensor in named if not tensor.frozen):
                raise SpecError("the profile lacks the order in which the parameters' gradients are ready")


def model_of(profile: Profile) -> ModelSpec:
    """Return the model of a job with a profile. Sizes that only the families' formulas read are 1."""
    return ModelSpec(
        name=profile.name,
        family="profile",
        hidden_size=1,
        intermediate_size=1,
        num_hidden_layers=sum(run.layers for run in profile.runs),
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=1,
        vocab_size=1,
        max_position_embeddings=profile.seq_len or profile.longest or 10**15,
        profile=profile,
    )
