"""The parts of FSDP2's training script that depend on tensor and context parallelism. ``verify`` runs the same code."""

from typing import NamedTuple

from zeroplan.spec.mesh import MeshSpec


class Pieces(NamedTuple):
    """The parts of the script that depend on the mesh."""

    imports: str
    degrees: str
    """Constants beside the numbers of replicas and shards."""
    world: str
    """The expression for the world size, in the script's constants."""
    mesh: str
    among: str
    """The expression for the part of the mesh over which FSDP2 shards."""
    helpers: str
    unmasked: bool
    """Whether attention is called without a mask."""
    splitting: str
    tokens: str
    """The definition of positions and of the random generator for tokens."""
    step: str
    """The code of one forward and backward."""


def pieces(mesh: MeshSpec) -> Pieces:
    """Return the script's parts for a mesh."""
    if mesh.model_ranks == 1:
        return _plain(mesh)
    context, tensor = mesh.cp > 1, mesh.tp > 1
    whole = '(REPLICAS, SHARDS * CONTEXT, TENSOR), mesh_dim_names=("replicate", "shard", "tensor")'
    shared = (
        "    arranged = init_device_mesh(device, (REPLICAS * SHARDS, CONTEXT, TENSOR), "
        'mesh_dim_names=("data", "context", "tensor"))\n'
    )
    splitting = (shared if context else "") + ('    split(model, mesh["tensor"])\n' if tensor else "")
    return Pieces(
        imports=(_TENSOR_IMPORTS if tensor else "") + (_CONTEXT_IMPORTS if context else ""),
        degrees=f"CONTEXT, TENSOR = {mesh.cp}, {mesh.tp}\n",
        world="REPLICAS * SHARDS * CONTEXT * TENSOR",
        mesh=whole,
        among='mesh["replicate", "shard"]' if mesh.dp_replicate > 1 else 'mesh["shard"]',
        helpers=(_UNMASKED if context else "") + (_SPLIT if tensor else ""),
        unmasked=context,
        splitting=splitting,
        tokens=_TOKENS,
        step=_SHARED.format(loss="loss_parallel(), " if tensor else "") if context else _PARALLEL,
    )


def _plain(mesh: MeshSpec) -> Pieces:
    several = '(REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard")' if mesh.dp_replicate > 1 else "(SHARDS,)"
    return Pieces("", "", "REPLICAS * SHARDS", several, "mesh", "", unmasked=False, splitting="", tokens="", step=_STEP)


_TENSOR_IMPORTS = """from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
"""
_CONTEXT_IMPORTS = "from torch.distributed.tensor.experimental import context_parallel\n"
_UNMASKED = '''

def unmasked():
    """Attention as transformers calls it, but without a mask: a gap in positions would be taken for the end of a sequence."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_unmasked", sdpa_attention_forward)
    return "sdpa_unmasked"
'''
_SPLIT = '''

def split(model, mesh):
    """As torchtitan splits transformers' models, with sequence parallelism; a head that is the embedding too stays so."""
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    along, whole = SequenceParallel(), Replicate()
    parallelize_module(model, mesh, {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=Shard(1)),
        "model.norm": along,
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }, src_data_rank=None)
    for block in blocks(model):
        plan = {
            "input_layernorm": along,
            "self_attn": PrepareModuleInput(input_kwarg_layouts={"hidden_states": Shard(1)},
                                            desired_input_kwarg_layouts={"hidden_states": whole}),
            "post_attention_layernorm": along,
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(whole,)),
            **{f"self_attn.{one}_proj": ColwiseParallel() for one in "qkv"},
            "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        if hasattr(block.self_attn, "q_norm"):
            of_heads = SequenceParallel(sequence_dim=2, use_local_output=True)
            plan |= {"self_attn.q_norm": of_heads, "self_attn.k_norm": of_heads}
        parallelize_module(block, mesh, plan, src_data_rank=None)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
'''
_TOKENS = """    positions = torch.arange(SEQ_LEN, device=device).unsqueeze(0)
    # ranks of one model and one sequence need the same tokens
    data = torch.Generator(device).manual_seed(dist.get_rank() // (CONTEXT * TENSOR))
"""
_STEP = """            ids = torch.randint(config.vocab_size, (MICRO_BATCH, SEQ_LEN), device=device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / GRAD_ACCUM).backward()
"""
_PARALLEL = """            ids = torch.randint(config.vocab_size, (MICRO_BATCH, SEQ_LEN), device=device, generator=data)
            with loss_parallel():
                loss = model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss
                (loss / GRAD_ACCUM).backward()
"""
_SHARED = """            ids = torch.randint(config.vocab_size, (MICRO_BATCH, SEQ_LEN), device=device, generator=data)
            following = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
            batch = {{"input_ids": ids, "labels": ids.clone(), "shift_labels": following, "position_ids": positions}}
            buffers = list(batch.values())
            with {loss}context_parallel(arranged["context"], buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
                loss = model(**batch, use_cache=False).loss
                (loss / GRAD_ACCUM).backward()
"""
