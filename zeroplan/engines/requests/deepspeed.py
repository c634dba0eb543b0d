"""DeepSpeed's training step at stages 0 to 2, request by request.

:mod:`zeroplan.engines.deepspeed.gradients` handles gradients and :mod:`zeroplan.engines.deepspeed.wrappers` the step; the
moments of an estimate use both, too.
"""

from zeroplan.engines.deepspeed import optimizer_impl
from zeroplan.engines.deepspeed.abandoned import abandoned_states
from zeroplan.engines.deepspeed.gradients import collects, plan_of
from zeroplan.engines.deepspeed.numbers import numbers_unsharded
from zeroplan.engines.deepspeed.stage12 import flat_in_fp32, weights_of
from zeroplan.engines.deepspeed.stage12_lines import job_of
from zeroplan.engines.deepspeed.stage12_offload import way_back
from zeroplan.engines.deepspeed.wrappers import Around, takes_flat_wrapper, wrapper_of
from zeroplan.engines.optimizers import LocalTensor
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.optimizer import Tensors, Update
from zeroplan.engines.requests.whole import WholePass
from zeroplan.engines.rows import numel
from zeroplan.ledger import Kind, Line
from zeroplan.spec.job import JobSpec

_FP32 = 4


class Step(WholePass):
    """Rank 0's micro-batches and steps."""

    def __init__(self, job: JobSpec, log: Log) -> None:
        one = self.job = job_of(job.model, job.recipe, job.mesh, job.batch)
        plan = plan_of(job.recipe, one.whole, ranks=int(one.n_ranks))
        super().__init__(job, log, plan)
        self.offloads, impl = plan.offloads, optimizer_impl(job.recipe)
        self.flat = bool(job.recipe.zero_stage) or (one.element == 2 and takes_flat_wrapper(job.recipe, impl))
        self.optimizer = Update(job.recipe.optimizer, impl, one.master if job.recipe.zero_stage else _FP32)
        self.wrapper = wrapper_of(one, impl, Around(log, self._step, self.gradients.release_gradients))

    @property
    def tensors(self) -> Tensors:
        """The tensors that the optimizer updates: a shard of all weights, or at stage 0 all weights, flat or separate."""
        if not self.flat:
            return [LocalTensor(each.parameter.shape, in_block=False) for each in self.whole.placed]
        return [(int(self.job.partition) if self.recipe.zero_stage else self.whole.n_elements,)]

    def _step(self) -> None:
        if not self.offloads:
            self.optimizer.step(self.log, self.tensors)

    def begin(self) -> None:
        """Request weights, DeepSpeed's copies of them, and the optimizer."""
        if not self.recipe.zero_stage and self.flat and self.log.starts != "recorded" and not self.frozen:
            self._flatten()
            return
        if self.recipe.zero_stage:
            self._shard()
        else:
            self.request_parameters(self.job.element)
            self._abandoned()
        if self.recipe.zero_stage or self.job.element != 2:
            if not self.offloads:
                self.optimizer.begin(self.log, self.tensors)
            return
        for n_elements in [self.whole.n_elements] if self.flat else map(numel, self.whole.placed):
            self.log.request("master", _FP32 * n_elements, Kind.OPTIMIZER_STATE, "weights in fp32")
        self.optimizer.make_states(self.log, self.tensors)  # ``initialize_optimizer_states`` runs an empty step

    def _shard(self) -> None:
        """``DeepSpeedZeroOptimizer.__init__``: flatten the weights, copy and cast the shard, make and free zero gradients.

        The freed tensors stay in the allocator's cache: original weights, copy, zeros. Leaves out those of ``BF16_Optimizer``.
        """
        log, job = self.log, self.job
        flat, *kept = self._flat_weights()
        if log.starts == "recorded" or collects(self.recipe):
            self._abandoned()
            self.request_parameters(job.element, trained=False)
            log.put("weights", flat, *kept)
            return
        self.request_parameters(job.element, trained=False)
        for each in self.whole.placed:
            log.request("as it was", job.element * numel(each), Kind.PARAMETERS, "a parameter, not yet flat")
        self._abandoned()
        log.put("weights", flat)
        log.release("as it was")
        log.request("copy", job.element * int(job.partition), Kind.PARAMETERS, "a copy of this rank's share, to be cast")
        log.put("weights", *kept)
        log.release("copy")
        if not self.offloads:
            log.request("zeros", job.master * int(job.partition), Kind.GRADIENTS, "zero gradients of this rank's share")
            log.release("zeros")

    @property
    def frozen(self) -> bool:
        """Whether some parameters get no gradients."""
        return any(one.frozen for one in self.parameters)

    def _flatten(self) -> None:
        """``FP16_Optimizer.__init__``: concatenate copies of all weights, cast a copy of the result, then run an empty step.

        The empty step's zero gradients and temporaries stay in the allocator's cache, and so does the original model.
        """
        log, width, n_elements = self.log, self.job.element, self.whole.n_elements
        for key in ("as it was", "copies"):
            for each in self.whole.placed:
                log.request(key, width * numel(each), Kind.PARAMETERS, "a parameter, not yet flat")
        log.request("parameters", width * n_elements, Kind.PARAMETERS, "all weights, flat")
        log.release("copies", "as it was")
        self._abandoned()
        log.request("copy", width * n_elements, Kind.PARAMETERS, "a copy of the flat weights, to be cast")
        log.request("master", _FP32 * n_elements, Kind.OPTIMIZER_STATE, "weights in fp32")
        log.release("copy")
        log.request("zeros", _FP32 * n_elements, Kind.GRADIENTS, "zero gradients of an empty step")
        self.optimizer.step(log, self.tensors)
        log.release("zeros")

    def _abandoned(self) -> None:
        """Request the states of an optimizer's original tensors, which DeepSpeed has replaced."""
        for line in abandoned_states(self.recipe, self.whole.n_elements, self.job.element):
            self.log.put_each("abandoned", line, [self.job.element * numel(each) for each in self.whole.placed])

    def _flat_weights(self) -> tuple[Line, ...]:
        """Return all trained weights as one padded tensor, and a shard of them in fp32, or all gradients in fp32."""
        if collects(self.recipe):
            return flat_in_fp32(self.job)
        flat, master, *_ = weights_of(self.job)
        return flat, *(way_back(self.job) if self.offloads else (master,))

    def before_micro_batch(self) -> None:
        """Release the tensors of the last step's optimizer (``zero_grad``)."""
        self.log.release("taken", "view")

    def after_backward(self) -> None:
        """Reduce the remaining gradients."""
        self.gradients.end()
        self.wrapper.after_backward(last=self.last)

    def update(self) -> None:
        """Run the wrapper's step."""
        self.log.call_all(numbers_unsharded(self.recipe, self.ranks))
        self.wrapper.step()


step_of = Step
