"""Frozen weights, under engines that hold them whole on every rank."""

from zeroplan.engines.account import Symbol
from zeroplan.ledger import Kind, Line
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.params import has_frozen, parameter_count, trained_count

ROUTED = "zeroplan assumes that all experts get equally many tokens; public runs of Mixtral took up to 1 % more"


def frozen_lines(model: ModelSpec, element_bytes: int, other_bytes: int, words: str, source: str) -> tuple[Line, ...]:
    """Return the frozen weights at ``element_bytes`` each; with weights in four bits, norms at ``other_bytes`` each. [bytes]"""
    if not has_frozen(model):
        return ()
    if model.adapter is not None and model.is_quantised:
        from zeroplan.engines.quantised import quantised_lines  # noqa: PLC0415  keeps start-up fast

        norms = other_bytes if model.upcasts_norms else element_bytes
        ends = other_bytes if model.upcasts_ends else element_bytes
        return quantised_lines(model, model.adapter.quantize, element_bytes=element_bytes, norm_bytes=norms, end_bytes=ends)
    n_bytes = element_bytes * (parameter_count(model) - trained_count(model))
    return (Line(Kind.PARAMETERS, n_bytes, f"frozen {words}, whole on every rank", f"{element_bytes}·Ψ_frozen", source),)


def frozen_symbols(model: ModelSpec) -> tuple[Symbol, ...]:
    """Return the numbers of trained and frozen weights, if some are frozen."""
    if not has_frozen(model):
        return ()
    trained = trained_count(model)
    of_trained = Symbol("Ψ", trained, "parameters that are trained")
    if model.is_quantised:
        from zeroplan.engines.quantised import quantised_symbols  # noqa: PLC0415  keeps start-up fast

        return (of_trained, *quantised_symbols(model))
    return (of_trained, Symbol("Ψ_frozen", parameter_count(model) - trained, "parameters that are frozen"))
