"""Attention of a Megatron-Core layer: queries, keys and values, their norms and positions; T5's cross attention."""

from zeroplan.expr import NOTHING, Size
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.megatron.core_attention import core, run_again, runs_core_again, scored
from zeroplan.transformer.families.megatron.matrices import added, column, duplicated, norm, row
from zeroplan.transformer.families.megatron.sources import CORE, LATENT
from zeroplan.transformer.families.megatron.structure import Layer
from zeroplan.transformer.families.megatron.symbols import (
    P_c,
    R_r,
    S_c,
    S_r,
    T_e,
    T_m,
    T_n,
    a_k,
    a_r,
    c_r,
    k_r,
    n_r,
    q_r,
    v_r,
    w_n,
)
from zeroplan.transformer.families.tags import STATISTICS
from zeroplan.transformer.families.tape import Part, Site, Store, Tape, Value
from zeroplan.transformer.symbols import e, h, o, u, w

CROSS = f"{CORE}/transformer/attention.py, CrossAttention.get_query_key_value_tensors"
QUERIES = f"{CORE}/transformer/attention.py, SelfAttention.get_query_key_value_tensors"
ROTARY = f"{CORE}/models/common/embeddings/rope_utils.py, _apply_rotary_pos_emb_bshd"
REPEATED = f"{CORE}/transformer/dot_product_attention.py, DotProductAttention.forward"
LAYOUT = "Transformer Engine 2026-08, pytorch/attention/dot_product_attention/utils.py, get_qkv_layout"
#: All decoder layers read this one tensor, so that no layer counts it.
ENCODED = "output of the encoder"


def attention(tape: Tape, normal: Value, structure: Layer) -> Value:
    """``SelfAttention.forward``: queries, keys and values, core attention, and the output projection."""
    latent = Part("mla_up_proj")
    joint = _joint(tape, normal, structure, latent)
    if structure.local and structure.latent == "no" and (structure.rotary or structure.head_norms or structure.grouped):
        context = _attended_locally(tape, joint, structure)
    else:
        context = run_again(tape, joint, structure) if structure.again else core(tape, joint, structure)
    if structure.latent != "no":
        tape.end(latent)
    tape.release(joint)
    made = row(tape, context, c_r, "the output projection", shared=True, layer="linear_proj")
    context.store.reason = "attention output, input of the output projection"
    tape.release(context)
    return made


def _joint(tape: Tape, normal: Value, structure: Layer, latent: Part) -> Value:
    """Queries, keys and values as core attention reads them."""
    if structure.latent != "no":
        return _latent(tape, normal, structure, latent)
    joint = column(tape, normal, q_r + k_r + v_r, "the matrix of queries, keys and values", layer="linear_qkv")
    joint.store.reason = "queries, keys and values"
    return joint if structure.local else _heads(tape, joint, structure)


def _latent(tape: Tape, normal: Value, structure: Layer, again: Part) -> Value:
    """Latent attention's queries, keys and values.

    Keys and values come from one latent, compressed queries from another. Each latent has a norm and a matrix; then the rotary
    parts are joined.
    """
    query = _queries(tape, normal) if structure.latent == "compressed" else column(tape, normal, q_r, "the matrix of queries")
    both, of = duplicated(tape, normal, w + o, "the matrix of the latent"), "gradient of the latent and rotary keys"
    latent = op.run(tape, both, "latent of keys and values", Site("latent, apart", LATENT), shape=T_n * w, gradient=of)
    tape.release(both)
    ready = norm(tape, latent, "the latent's norm", shape=T_n * w)
    tape.release(latent)
    wide = column(tape, ready, n_r, "the matrix of keys and values", reads=w)
    tape.release(ready)
    tables, beside = _by_torch(tape, structure)
    with tape.within(again):
        made = op.run(
            tape, (query, wide), "queries, keys and values", Site("queries, keys and values, joined", LATENT),
            shape=T_m * (q_r + k_r + v_r), saved=tables, gradient="gradient of queries, or of keys and values", beside=beside,
        )  # fmt: skip
    tape.drop(*tables)
    tape.release(query, wide)
    return made


def _queries(tape: Tape, normal: Value) -> Value:
    narrow = duplicated(tape, normal, u, "the matrix of compressed queries")
    ready = norm(tape, narrow, "the compressed queries' norm", shape=T_n * u)
    tape.release(narrow)
    made = column(tape, ready, q_r, "the matrix of queries", reads=u)
    tape.release(ready)
    return made


def _heads(tape: Tape, joint: Value, structure: Layer) -> Value:
    """Queries, keys and values as the kernel reads them. Head norms, positions and FlashAttention's layout make copies."""
    if structure.head_norms:
        joint = _normal_heads(tape, joint)
    if not (structure.rotary or structure.attention == "flash"):
        return joint
    tables, beside = _by_torch(tape, structure)
    site, of = Site("layout of queries, keys and values", LAYOUT), "their gradient, joined"
    made = op.run(tape, joint, "queries, keys and values", site, saved=tables, gradient=of, beside=beside)
    tape.drop(*tables)
    tape.release(joint)
    return made


def _by_torch(tape: Tape, structure: Layer) -> tuple[tuple[Store, ...], tuple[str, Size] | None]:
    """Return the tables that torch's rotary positions keep, and the temporaries of their backward; nothing with a fused kernel.

    In forward and backward, two products as large as the queries are alive beside the sum and its copy.
    """
    if not (structure.rotary and structure.torch_rotary):
        return (), None
    products = "products of queries with cosines and sines", 2 * e * T_m * q_r
    tape.temporary(*products, ROTARY)
    return (tape.make(op.TENSOR, "cosines and sines of queries and keys", 4 * e * R_r, ROTARY),), products


def _normal_heads(tape: Tape, joint: Value) -> Value:
    """Norms over each head of queries and keys. They keep copies of their inputs."""
    made = op.tensor(tape, "queries, keys and values", e, joint.shape, QUERIES)
    read = tape.make(op.TENSOR, "queries and keys before their norms", e * T_m * (q_r + k_r), QUERIES)
    kept = tape.make(op.TENSOR, "statistics of the heads' norms, fp32", 2 * w_n * T_m * a_r, QUERIES, STATISTICS)
    backward = op.makes("gradient through the heads' norms", QUERIES, joint)
    tape.add("norms of queries and keys", (made,), (read, kept), backward, of=None)
    tape.drop(read, kept)
    tape.release(joint)
    return made


def _attended_locally(tape: Tape, joint: Value, structure: Layer) -> Value:
    """Attention of local modules. Torch runs norms and positions, and repeats keys and values for each query head."""
    shapes = T_m * q_r, T_m * k_r, T_m * v_r
    query, keys, values = op.chunk(tape, joint, shapes, Site("queries, keys and values", QUERIES))
    if structure.grouped:
        query = _copied(tape, query, "queries, all heads in a row", QUERIES)
    if structure.head_norms:
        query = _norm_of_heads(tape, query, "the queries' norm", T_m * a_r)
        keys = _norm_of_heads(tape, keys, "the keys' norm", T_m * a_k)
    if structure.rotary:
        query, keys = (_with_positions(tape, one, what) for one, what in ((query, "queries"), (keys, "keys")))
    again = Part("core_attn")
    if structure.grouped:
        saved = (keys.store, values.store) if runs_core_again(structure) else ()
        with tape.within(again):
            keys, values = (
                _copied(tape, one, f"{what}, one for each query head", REPEATED, f"gradient of {what}", saved=kept)
                for one, what, kept in ((keys, "keys", saved), (values, "values", ()))
            )
    made = scored(tape, (query, keys), values, S_r, structure, masked=None)
    tape.end(again)
    return made


def _copied(
    tape: Tape, value: Value, reason: str, source: str, gradient: str = "", *, saved: tuple[Store, ...] = ()
) -> Value:  # fmt: skip
    """Return a copy as wide as all query heads."""
    made = op.run(tape, value, reason, source, shape=T_m * q_r, saved=saved, gradient=gradient)
    tape.release(value)
    return made


def _norm_of_heads(tape: Tape, value: Value, name: str, rows: Size) -> Value:
    made = norm(tape, value, name, shape=value.shape, rows=rows)
    tape.release(value)
    return made


def _with_positions(tape: Tape, value: Value, what: str) -> Value:
    """Rotary positions by torch's operators, which keep the cosines and sines."""
    tables, site = (f"cosines and sines of {what}", 2 * e * R_r), Site(f"positions of {what}", ROTARY)
    made = op.run(tape, value, f"{what}, rotated", site, keeps=(tables,), gradient=f"gradient of {what}")
    tape.release(value)
    return made


def crossed(tape: Tape, given: Value, structure: Layer) -> Value:
    """A decoder layer's attention to the encoder's output, after its own norm."""
    encoded = Value(tape.make(op.TENSOR, ENCODED, NOTHING, CROSS), e, T_e * h)
    normal = norm(tape, given, "the cross attention's norm")
    query = column(tape, normal, q_r, "the matrix of cross queries")
    tape.release(normal)
    both = column(tape, encoded, k_r + v_r, "the matrix of the encoder's keys and values", tokens=T_e)
    keys, values = op.chunk(tape, both, (T_e * k_r, T_e * v_r), Site("the encoder's keys and values", CROSS))
    tape.release(both)
    context = scored(tape, (query, keys), values, S_c, structure, masked=None if structure.local else P_c)
    attended = row(tape, context, c_r, "the cross attention's output projection")
    tape.release(context)
    made = added(tape, attended, given, "input of the MLP's norm behind the cross attention", structure)
    tape.release(attended, given, encoded)
    return made
