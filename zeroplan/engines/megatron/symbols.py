"""The symbols in the formulas of a rank, with their values and meanings."""

from collections.abc import Iterator

from zeroplan.engines.account import Symbol
from zeroplan.engines.megatron.chunks import layers_of_a_checkpoint, runs_of
from zeroplan.engines.megatron.in_flight import in_flight_of
from zeroplan.engines.megatron.leftover import behind_by, left_by
from zeroplan.engines.megatron.moments import lasts_of
from zeroplan.engines.megatron.muon import muon_step
from zeroplan.engines.megatron.parameters import padded_vocabulary
from zeroplan.engines.megatron.rank import Rank, expert_sharers, sharers
from zeroplan.engines.megatron.sharded import sharding_of
from zeroplan.engines.megatron.states import made_gradients, of_each_shape, symbols_in_fp8, symbols_on_host
from zeroplan.ledger import total_bytes
from zeroplan.numeric import Int
from zeroplan.spec.described import Job
from zeroplan.transformer.megatron import Layers


def symbols_of(rank: Rank, layers: Layers, job: Job) -> Iterator[Symbol]:
    """Yield the symbols in the formulas of one job."""
    yield Symbol("D_rank", rank.elements, "parameters of this pipeline rank beside experts")
    yield Symbol("X_rank", rank.experts, "parameters of this pipeline rank in experts")
    if job.model.adapter is not None:
        yield Symbol("F_rank", rank.frozen, "frozen parameters of this pipeline rank")
        yield Symbol("z", job.model.adapter.rank, "rank of the adapters")
    yield from _symbols_of_muon(rank, job)
    yield from symbols_in_fp8(rank, job)
    yield from symbols_on_host(rank, job)
    if (sharding := sharding_of(rank, job)) is not None:
        yield from sharding.symbols(sharding.backwards(lasts_of(rank, job), layers_of_a_checkpoint(job.recipe)))
    for at, elements in made_gradients(rank, job).items():
        yield Symbol(f"A_{at}", elements, f"gradients that a backward has made, at the moment: {at}")
    yield Symbol("N_opt", sharers(job), "ranks that share the optimizer's states")
    yield Symbol("N_exp", expert_sharers(job), "ranks that share those of experts")
    yield Symbol("K", rank.chunks, "chunks of layers in flight")
    yield from _symbols_in_flight(rank, layers, job)
    yield Symbol("H", rank.embeds, "micro-batches whose embedding is kept")
    yield from _symbols_of_left(left_by(rank, job)._asdict(), "L", "left from before")
    yield from _symbols_of_left(behind_by(rank, job)._asdict(), "J", "that dispatchers' graphs refer to")
    yield Symbol("M", of_each_shape(rank, job), "elements of one matrix of each shape")
    yield Symbol("B", job.batch.grad_accum_steps, "micro-batches of a step")
    yield Symbol("C", job.mesh.cp, "context-parallel ranks")
    yield Symbol("p", job.mesh.tp, "tensor-parallel ranks")
    yield Symbol("V_p", padded_vocabulary(job), "vocabulary, padded")
    yield from (Symbol(*one) for one in layers.symbols)
    yield from _sums(layers)


def _symbols_of_muon(rank: Rank, job: Job) -> Iterator[Symbol]:
    if rank.muon is not None:
        yield Symbol("Y_own", rank.muon.matrices, "parameters that this rank updates with Muon: the rank with the most")
        yield Symbol("A_own", rank.muon.others, "parameters that this rank updates with Adam beside Muon")
        yield Symbol("P_rank", rank.padding, "padding of the buffers, in which no matrix is on two ranks")
        yield Symbol("Y_step", muon_step(job).n_bytes, "bytes of the Newton-Schulz iterates")


def _symbols_of_left(counts: dict[str, Int], letter: str, what: str) -> Iterator[Symbol]:
    """Yield the symbols for leftover hidden states, one per moment."""
    for when, count in counts.items():
        yield Symbol(f"{letter}_{when[0]}", count, f"hidden states {what}: {when}")


def _symbols_in_flight(rank: Rank, layers: Layers, job: Job) -> Iterator[Symbol]:
    """Yield the symbols for layers in flight if the rank's chunks differ in their layers."""
    for loss, when in ((False, ""), (True, " when the loss is computed")) if len(set(rank.each)) > 1 else ():
        in_flight = in_flight_of(rank, layers, job, loss=loss)
        for name, run, count in zip(in_flight.formulas, runs_of(job), in_flight.counts, strict=True):
            yield Symbol(name, count, f"{run.kind} layers in flight{when}")


def _sums(layers: Layers) -> Iterator[Symbol]:
    """Yield the symbols for the bytes that a layer of each kind keeps."""
    for kind, one in layers.kinds.items():
        yield Symbol(f"S_{kind}", total_bytes(one.kept), f"bytes one {kind} layer keeps")
        whole = total_bytes((*one.cost.kept, *one.cost.statistics))
        yield Symbol(f"W_{kind}", whole, f"bytes one {kind} layer keeps that is not recomputed whole")
        yield Symbol(f"Z_{kind}", total_bytes(one.statistics), f"bytes of one {kind} layer's statistics")
