"""A model's forward and backward, request by request, with hooks for the engine's own requests."""

from collections.abc import Hashable, Iterable, Iterator

from zeroplan.engines.outside import outside, recompute_of
from zeroplan.engines.precisions import compute_of, widths
from zeroplan.engines.requests.log import Log, Part
from zeroplan.ledger import Among, Kind, Phase, Role
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.blocks import Compute, HeadPass
from zeroplan.transformer.families.requested import (
    Instruction,
    Sized,
    Thing,
    block_requests,
    ending_requests,
    torchtitan_requests,
)
from zeroplan.transformer.families.tape import Do
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter, below_blocks
from zeroplan.transformer.recomputed import first_recomputed, layout_by_recomputation, order_by_recomputation

ENDING = -2
"""The layer number of the modules after the blocks."""
_OF_MODULES = (Do.ENTER, Do.LEAVE, Do.RETURN, Do.DONE)


class ModelPass:
    """One micro-batch through the model, forward and backward. Engines override the hooks."""

    marks_modules = False
    """Whether the engine acts where a module with weights begins or ends (:meth:`at_module`)."""
    holds_batch = True
    """Whether the engine holds the token ids until the backward ends; else the embedding's backward frees them."""

    def __init__(
        self, model: ModelSpec, recipe: RecipeSpec, batch: Batch, log: Log, *, compute: Compute | None = None,
        tree: Layout | None = None, head: HeadPass | None = None,
    ) -> None:  # fmt: skip
        """Store the model's programs and the sizes of their requests.

        For ranks that split a model: ``compute`` is how they run it, ``tree`` their parameters, and ``head`` the rest of the
        model.
        """
        self.log, self.recipe, self.per_step = log, recipe, batch.grad_accum_steps
        self.blocks: tuple[Sized, ...] = ()
        self.narrows_frozen = not model.frozen_as_trained
        self.quantize = "none" if model.adapter is None else model.adapter.quantize
        self.upcasts_norms, self.upcasts_ends = model.upcasts_norms, model.upcasts_ends
        first = first_recomputed(model, recipe)
        self.compute = compute = compute or compute_of(recipe)
        self.tree = tree = tree or layout_by_recomputation(model, first)
        self.splits = {Among.TENSOR: compute.tp, Among.SEQUENCE: compute.cp, Among.EXPERTS: compute.expert_ranks}
        self.width, self.autocast = compute.element_bytes, compute.autocast
        self.gradient_width = widths(recipe.precision).stored if compute.autocast else self.width
        self.order = order_by_recomputation(model, first)
        self.recomputes = tuple(recompute_of(run, compute) for run in tree.runs)
        if recipe.fsdp2.are_torchtitans:
            from zeroplan.engines.fsdp2.torchtitan import passes_of  # noqa: PLC0415  only its jobs pay for it

            block, self.ending = torchtitan_requests(model, compute, batch, recipe.recompute)
            self.blocks = (block,)
            _, self.head, rotations = passes_of(model, recipe, batch)
            self.log.put("rotations", rotations)
        else:
            self.head = head or outside(model, recipe, batch)
            self.blocks = tuple(self._sized(model, run, batch) for run in tree.runs)
            self.ending = ending_requests(model, compute, batch, recipe.loss, marking=self.marks_modules)
        self.flow: Hashable = None
        """The key of the gradient that flows from block to block."""
        self.arriving: list[Hashable] = []
        self.casts: dict[tuple[int, Thing], list[Hashable]] = {}
        """Autocast's copies of a layer's weights by their elements, the latest last."""
        self.step, self.last = 0, True
        self._parts: dict[Hashable, tuple[Part, object]] = {}
        """Micro-batches that can be written again, by :meth:`kind_of`, with the engine's state after them."""
        self.is_before_head = self.is_in_model = False
        self.has_begun = False
        """Whether the first micro-batch has run."""

    def _sized(self, model: ModelSpec, run: BlockRun, batch: Batch) -> Sized:
        compute = self.compute
        if run.plain:
            compute = compute._replace(recompute="none")
        return block_requests(model, run.kind, compute, batch, recompute_of(run, compute), marking=self.marks_modules)

    @property
    def parameters(self) -> list[Parameter]:
        """Every parameter, in the order of ``model.parameters()``."""
        blocks = [one for run in self.order for one in self.tree.runs[run].parameters]
        return [*self.tree.embeddings, *blocks, *self.tree.tail]

    def request_parameters(self, width: int, *, trained: bool = True) -> None:
        """Request all parameters whole, or only frozen ones. Frozen ones beside adapters have the compute dtype or four bits."""
        sizes = [self._bytes_of(one, width) for one in self.parameters if trained or one.frozen]
        self.log.put_all("parameters", [(n_bytes, Kind.PARAMETERS, "a parameter", False) for n_bytes in sizes])
        self.request_scales(self.parameters)

    def _bytes_of(self, one: Parameter, width: int) -> int:
        if self.quantize == "none" or not one.frozen:
            return (self.width if one.frozen and self.narrows_frozen else width) * one.numel
        from zeroplan.engines.quantised import is_bias, packed_bytes  # noqa: PLC0415  keeps start-up fast

        narrow = is_bias(one) or not (self.upcasts_norms if len(one.shape) == 1 else self.upcasts_ends)
        return packed_bytes(one) if one.quantised else (self.width if narrow else width) * one.numel

    def request_scales(self, parameters: Iterable[Parameter]) -> None:
        """Request the scales and tables of weights in four bits."""
        if self.quantize == "none":
            return
        from zeroplan.engines.quantised import scales_of_each  # noqa: PLC0415  keeps start-up fast

        self.log.put("scales", *scales_of_each(parameters, self.quantize))

    def run(self, steps: int) -> Log:
        """Run the setup and this many steps, or what is left of them after :meth:`run_first`."""
        if not self.has_begun:
            self.run_first()
        for _ in self.micro_batches(steps):
            self.update()
        return self.log

    def run_first(self) -> Log:
        """Run the setup and the first micro-batch."""
        self.begin()
        self._micro_batch(0, 0)
        self.has_begun = True
        return self.log

    def micro_batches(self, steps: int) -> Iterator[None]:
        """Run the micro-batches of each step; at every ``yield`` the optimizer's step has begun."""
        for step in range(steps):
            for micro in range(1 if self.has_begun and not step else 0, self.per_step):
                self._micro_batch(step, micro)
            self.log.begin(step, Phase.STEP)
            yield

    def _micro_batch(self, step: int, micro: int) -> None:
        self.step, self.last = step, micro + 1 == self.per_step
        self.log.begin(step, Phase.FORWARD)
        self.before_micro_batch()
        kind, start = self.kind_of(micro), self.log.ends
        if kind in self._parts:
            part, state = self._parts[kind]
            self.log.repeat(part, step)
            self.after_repeat(state)
            return
        standing = {} if kind is None else self.log.standing(start[1])
        self.forward()
        self.backward()
        if kind is not None and (found := self.log.written_since(start, standing)) is not None:
            self._parts[kind] = found, self.state

    # --- what an engine does ------------------------------------------------------------------------------------------------

    def kind_of(self, micro: int) -> Hashable:  # noqa: ARG002  an engine's own answer may need it
        """Return what micro-batches with the same requests have in common; None for a micro-batch that is like no other."""
        return None

    @property
    def state(self) -> object:
        """What the engine keeps in mind after a micro-batch."""
        return None

    def after_repeat(self, state: object) -> None:
        """Keep in mind a micro-batch whose requests were copied from an earlier one; ``state`` was the engine's after that."""

    def before_micro_batch(self) -> None:
        """Run first of all, even if what follows is copied from an earlier micro-batch."""

    def begin(self) -> None:
        """Build the model and the optimizer."""

    def update(self) -> None:
        """Run the optimizer's step."""

    def before_forward(self) -> None:
        """Run before the model's forward."""

    def before_block(self, layer: int) -> None:
        """Run before a block's forward."""

    def after_block(self, layer: int) -> None:
        """Run after a block's forward."""

    def after_embedding(self) -> None:
        """Run after the embedding."""

    def before_ending(self) -> None:
        """Run before final norm, head and loss."""

    def after_forward(self) -> None:
        """Run after the model's forward, still in autocast's context."""

    def before_ending_backward(self) -> None:
        """Run before the backward, which begins with the loss."""

    def before_head_backward(self) -> None:
        """Run before the backward of the head's product."""

    def after_ending_backward(self) -> None:
        """Run after the backward of loss, head and final norm."""

    def before_embedding_backward(self) -> None:
        """Run after the backward of all blocks."""

    def before_block_backward(self, layer: int) -> None:
        """Run before a block's backward."""

    def holds_input(self, layer: int) -> bool:  # noqa: ARG002  an engine's own answer may need it
        """Whether a recomputed block's input is still alive in :meth:`after_block_backward`."""
        return False

    def after_block_backward(self, layer: int) -> None:
        """Run after a block's backward."""

    def after_backward(self) -> None:
        """Run after the backward."""

    def at_module(self, do: Do, owner: Thing) -> None:
        """Run where a module with weights begins or ends, forward or backward; ``owner`` is the module in the block's program."""

    def arrived(self, gradients: list[Hashable]) -> None:
        """Take over gradients that have reached their weights."""

    # --- forward ------------------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Run the embedding, all blocks and the loss."""
        log = self.log
        self.before_forward()
        log.layer = -1
        self.take_batch()
        self.log.put("tables", *self.head.with_blocks)
        self.embed()
        self.after_embedding()
        self.log.put("by name", *self.head.forward)
        for layer, run in enumerate(self.order):
            log.layer = layer
            self.before_block(layer)
            self._play(layer, self.program(layer), forward=True)
            self.after_block(layer)
            self._name_goes(layer, run)
        self.ending_forward()

    def program(self, layer: int) -> Sized:
        """Return a layer's program."""
        return self.blocks[self.order[layer]]

    def ending_forward(self) -> None:
        """Run final norm, head and loss."""
        log = self.log
        log.layer = ENDING
        self.before_ending()
        self.is_in_model = True
        self._play(ENDING, self.ending, forward=True)
        self._model_returns()
        if self.recipe.keep_logits:
            self.log.put("output", *self.head.output)
        self.after_forward()
        log.release(("cached",))

    def take_batch(self) -> None:
        """Request the batch."""
        self.log.put("batch", *self.head.at_embedding)

    def embed(self) -> None:
        """Run the embedding. With offloaded block inputs the graph holds a frozen embedding's output."""
        if self.compute.offloaded and any(line.tag.role is Role.BLOCK_INPUT for line in self.head.with_blocks):
            return  # among the tables
        self.log.request(("hidden", -1), self._hidden_bytes, Kind.ACTIVATIONS, "token embeddings")

    @property
    def _hidden_bytes(self) -> int:
        return int(self.head.hidden_bytes)

    def _name_goes(self, layer: int, run: int) -> None:
        """Release the previous hidden state, unless the graph or another variable holds it."""
        kept = self.blocks[run].requested.saves_given or self.recomputes[run] != "none"
        if not (kept and not self.compute.offloaded) and not (not layer and self.head.first_input):
            self.log.release(("hidden", layer - 1))

    def _play(self, layer: int, sized: Sized, *, forward: bool) -> None:
        """Write a program. Until a matrix product that is awaited, each request is the engine's concern, too (:meth:`_do`)."""
        waits = self.is_in_model or self.is_before_head or ("forward" if forward else "backward") not in self.log.products
        ends, log = self._ends(layer, sized), self.log
        if waits:
            for one in sized.forward if forward else sized.backward:
                self._do(layer, one, ends, forward=forward)
            return
        places = [] if forward else [place for thing in sized.saved for place in log.held.pop((layer, thing))]
        for made, deeds, kept, then in sized.stretches[not forward]:
            if deeds:
                log.write(made, deeds, places)
            for thing, number in kept:
                log.held.setdefault(ends.get(thing, (layer, thing)), []).append(places[number])
            if then is not None:
                self._do(layer, then, ends, forward=forward)

    def _do(self, layer: int, one: Instruction, ends: dict[Thing, Hashable], *, forward: bool) -> None:
        do, thing, size, pieces, kind, reason, multiplies, sends, is_scratch = one
        log = self.log
        if do is Do.REQUEST:
            if multiplies:
                self._multiplies("forward" if forward else "backward")
            for _ in range(pieces):
                log.request(ends.get(thing, (layer, thing)), size, kind, reason, is_scratch=is_scratch)
        elif do is Do.RELEASE:
            log.release(ends.get(thing, (layer, thing)))
        elif do is Do.GRADIENT:
            self._weight_gradient(size, forward=forward)
        elif do is Do.ARRIVE:
            self._hand_over()
        elif do in _OF_MODULES:
            self.at_module(do, thing)
        elif sends is not None:
            log.call(sends.operation, size, self.splits[sends.among], sends.among)
        elif do is Do.CAST:
            self._cast(layer, thing, size, forward=forward)
        else:
            self._uncast(layer, thing)

    def _model_returns(self) -> None:
        """Release the variables of the model's forward when it returns, after the final norm."""
        if self.is_in_model:
            self.is_in_model = False
            self.log.release("by name", *((("hidden", -1),) if self.head.first_input else ()))

    def _multiplies(self, phase: str) -> None:
        self._model_returns()
        if phase not in self.log.products:
            self.log.multiplies(phase)
        if self.is_before_head and phase == "backward":
            self.is_before_head = False
            self.before_head_backward()

    def _cast(self, layer: int, thing: Thing, elements: int, *, forward: bool) -> None:
        """Request autocast's copy of a weight. Autograd saves it; for a recomputed block only autocast's cache holds it."""
        key: Hashable = ("cast", layer, len(self.log.requests))
        if forward and layer != ENDING and self.recomputes[self.order[layer]] != "none":
            key = ("cached",)
        else:
            self.casts.setdefault((layer, thing), []).append(key)
        self.log.request(key, self.width * elements, Kind.WEIGHT_CASTS, "16-bit copy of a weight")

    def _uncast(self, layer: int, thing: Thing) -> None:
        if self.casts.get((layer, thing)):
            self.log.release(self.casts[layer, thing].pop())

    def _ends(self, layer: int, sized: Sized) -> dict[Thing, Hashable]:
        requested, below = sized.requested, (len(self.order) if layer == ENDING else layer) - 1
        ends: dict[Thing, Hashable] = {requested.given: ("hidden", below)}
        if layer != ENDING:
            ends[requested.made] = ("hidden", layer)
            ends[requested.incoming] = self.flow
        return ends

    def _hand_over(self) -> None:
        self.arrived(self.arriving)
        self.arriving = []

    def _weight_gradient(self, elements: int, *, forward: bool) -> None:
        """Make a weight's gradient. The backward's first matrix product is the one of a weight gradient."""
        if elements and not forward:
            self._multiplies("backward")
        self.make_gradient(elements)

    def make_gradient(self, elements: int) -> None:
        """Request the gradient of a weight of this many elements, if any."""
        if not elements:
            return
        key = "gradient", self.log.layer, len(self.log.requests)
        self.log.request(key, self.gradient_width * elements, Kind.UNSHARDED_GRADIENTS, "gradient of a weight")
        if self.waits_for_the_embedding(elements):
            self.log.rename(key, "tied")
        else:
            self.arriving.append(key)

    def waits_for_the_embedding(self, elements: int) -> bool:
        """Whether this is a tied head's gradient, which autograd holds until the embedding's exists."""
        tied = self.tree.tied_head
        return tied is not None and self.log.layer == ENDING and elements == tied.numel and self.recipe.loss != "chunked"

    # --- backward -----------------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """Run loss and head, all blocks from the last to the first, then the embedding."""
        log = self.log
        log.begin(self.step, Phase.BACKWARD)
        self.ending_backward()
        for layer in reversed(range(len(self.order))):
            log.layer, run = layer, self.order[layer]
            if self.flow is None and self.recomputes[run] == "none":
                break
            self.before_block_backward(layer)
            self._backward_of(layer, self.program(layer))
            kept = self.recomputes[run] != "none" and not self.compute.offloaded and (layer or not self.head.first_input)
            if kept and not self.holds_input(layer):
                log.release(("hidden", layer - 1))
            self.after_block_backward(layer)
            if kept and self.holds_input(layer):
                log.release(("hidden", layer - 1))
        log.layer = -1
        log.release("tables")
        if self.flow is not None:
            self.below_backward()
        self.after_backward()
        log.release("output", "batch")

    def ending_backward(self) -> None:
        """Run loss, head and final norm backward."""
        self.log.layer = ENDING
        self.before_ending_backward()
        self.is_before_head = True
        self._backward_of(ENDING, self.ending)
        self._hand_over()  # a fused loss makes the head's gradient, and a norm need not follow
        self.after_ending_backward()

    def below_backward(self) -> None:
        """Run the embedding's backward."""
        self.before_embedding_backward()
        self._embedding_backward()

    def _backward_of(self, layer: int, sized: Sized) -> None:
        self._play(layer, sized, forward=False)
        outgoing = sized.requested.outgoing
        self.flow = self._ends(layer, sized).get(outgoing, (layer, outgoing)) if outgoing is not None else None

    def embedding_gradients(self) -> None:
        """Make the gradients of the tables below the blocks. The token embedding's is the last."""
        for parameter in reversed(below_blocks(self.tree)):
            self._hand_over()
            if not parameter.frozen and "final_layer_norm" not in parameter.name:  # OPT's comes before the blocks
                self.make_gradient(parameter.numel)
        self.log.release(self.flow)
        if not self.holds_batch:
            self.log.release("batch")

    def _embedding_backward(self) -> None:
        self.embedding_gradients()
        if self.log.has("tied"):
            self.sum_of_tied(self.arriving.pop())
        elif self.tree.tied_head is not None and not self.tree.tied_head.frozen:  # chunks' are the parameter's already
            self.log.release(self.arriving.pop())
        self._hand_over()

    @property
    def head_gives_a_view(self) -> bool:
        """Whether the head's gradient is a view, into which autograd never adds in place."""
        return self.recipe.loss == "full" and not self.autocast

    def sum_of_tied(self, embedding: Hashable) -> None:
        """Sum the embedding's and the head's gradients as autograd does: in place, unless the head's is a view."""
        if self.head_gives_a_view:
            self.make_gradient(self.tree.embeddings[0].numel)
            self.log.release("tied", embedding)
        else:
            self.log.release(embedding)
            self.log.rename("tied", embedding)
            self.arriving.append(embedding)
