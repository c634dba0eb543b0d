"""Megatron-Core's Mamba-2 mixer: one operator for convolution and scan over chunks of tokens."""

from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.megatron.matrices import column, norm, row
from zeroplan.transformer.families.megatron.sources import CORE
from zeroplan.transformer.families.megatron.structure import Layer
from zeroplan.transformer.families.megatron.symbols import B_r, N_r, Q_r, T_m, Z_r, i_r
from zeroplan.transformer.families.tape import Arriving, Site, Store, Tape, Value
from zeroplan.transformer.symbols import e

MIXER = f"{CORE}/ssm/mamba_mixer.py, MambaMixer._ssm_training"
SCAN = "mamba 2026-07, mamba_ssm/ops/triton/ssd_combined.py, MambaSplitConv1dScanCombinedFn"
STATES = "mamba 2026-07, mamba_ssm/ops/triton/ssd_combined.py, _mamba_chunk_scan_combined_fwd"
SCAN_BACK = "mamba 2026-07, mamba_ssm/ops/triton/ssd_combined.py, _mamba_chunk_scan_combined_bwd"


def mixed(tape: Tape, normal: Value, _structure: Layer) -> Value:
    """``MambaMixer.forward``: a matrix, one operator for convolution and scan, a norm, and a matrix."""
    first = column(tape, normal, 2 * i_r + B_r + Z_r, "Mamba's first matrix")
    read = op.run(
        tape, first, "gates, inputs, factors and steps of the scan", Site("order of the scan's input", MIXER),
        gradient="gradient of the first matrix's output, tokens first",
    )  # fmt: skip
    tape.release(first)
    scanned = _scanned(tape, read)
    tape.release(read)
    ordered = op.run(tape, scanned, "the scan's result, input of its norm", Site("order of the scan's result", MIXER))
    tape.release(scanned)
    ready = norm(tape, ordered, "the scan's norm", shape=T_m * i_r, rows=T_m)
    tape.release(ordered)
    made = row(tape, ready, i_r, "Mamba's second matrix")
    tape.release(ready)
    return made


def _scanned(tape: Tape, read: Value) -> Value:
    """The scan over chunks of tokens. It keeps its input and its output before the gate, and recomputes the rest."""
    passing = tape.make(op.TEMPORARY, "convolved inputs and factors", e * T_m * (i_r + B_r), SCAN)
    steps = tape.make(op.TEMPORARY, "steps and their sums, fp32", 8 * T_m * Z_r, STATES)
    wide = tape.make(op.TEMPORARY, "states of each chunk, fp32", 4 * N_r, STATES)
    states = tape.make(op.TEMPORARY, "states of each chunk", e * N_r, STATES)
    tape.drop(wide)
    factors = tape.make(op.TEMPORARY, "products of the factors within chunks, fp32", 4 * Q_r, STATES)
    made = op.tensor(tape, "the scan's result", e, T_m * i_r, STATES)
    plain = tape.make(op.TENSOR, "the scan's result before the gate", e * T_m * i_r, STATES)
    tape.drop(passing, steps, states, factors)

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        gradient = op.gradient(tape, read, "gradient of the scan's input", SCAN)
        for reason, size in (
            ("inputs and factors, convolved again, and their gradient", 2 * e * T_m * (i_r + B_r)),
            ("gradient of the scan's result before the gate", e * T_m * i_r),
            ("steps and their sums, fp32, and the steps' gradient", (12 + e) * T_m * Z_r),
            ("products of the factors within chunks, fp32", 4 * Q_r),
        ):
            tape.temporary(reason, size, SCAN_BACK)
        wide = tape.make(op.TEMPORARY, "states and their gradients, fp32, and in 16 bits", (8 + 2 * e) * N_r, SCAN_BACK)
        tape.drop(wide)
        tape.temporary("states and their gradients", 2 * e * N_r, SCAN_BACK)
        tape.temporary("gradients of the factors, fp32, and of their products, twice", 4 * T_m * B_r + 8 * Q_r, SCAN_BACK)
        return [(read, gradient)]

    tape.add("scan", (made,), (read.store, plain), backward, of=None)
    tape.drop(plain)
    return made
