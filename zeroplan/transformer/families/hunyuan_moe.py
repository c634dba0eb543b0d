"""Hunyuan's models with experts (Hunyuan-A13B): dense Hunyuan's attention, an MLP that every token visits, and routed experts."""

from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.decoder import LLAMA_NORM, Layer, gated_mlp, layer
from zeroplan.transformer.families.definition import Block, Definition
from zeroplan.transformer.families.experts import routed_experts, router
from zeroplan.transformer.families.keys import WITH_EXPERTS
from zeroplan.transformer.families.llama import HUNYUAN, NORMS_AT_THE_END, NORMS_LAST
from zeroplan.transformer.families.module_names import before_and_after, gated_modules
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import attention_of, fused_experts, gated, head_norms, with_experts
from zeroplan.transformer.params_modules import Parameters, linear

MODEL = "transformers 5.23, models/hunyuan_v1_moe/modeling_hunyuan_v1_moe.py"
MOE = f"{MODEL}, HunYuanMoEV1Moe.forward"


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    """Run the shared MLP, then the routed experts. The shared output and the routing tensors live to the module's end."""
    shared = gated_mlp(tape, normal, block, MOE, prefix="shared MLP: ")
    flat = op.view(tape, normal, Site("experts: their input", MOE))
    routing = router(tape, flat, narrowed=True)
    routed = routed_experts(tape, flat, routing.weights, block)
    tape.release(flat)
    made = op.add(tape, routed, shared, "output of experts and shared MLP", MOE)
    tape.drop(routing.indices)
    tape.release(routed, shared, routing.weights, routing.logits)
    return made


def _tensors(model: ModelSpec) -> Layout:
    def routed(moe: MoeSpec) -> Parameters:
        gate = linear("mlp.gate.wg", model.hidden_size, moe.num_experts)
        return (*gate, *fused_experts(model, moe), *gated("mlp.shared_mlp", model, model.intermediate_size))

    attention = attention_of(model, bias=model.attention_bias)
    return with_experts(model, (*attention, *head_norms(model, ("query_layernorm", "key_layernorm"))), routed)


_CONFIG = HUNYUAN._replace(required=WITH_EXPERTS.required, counted_as=WITH_EXPERTS.counted_as).plus(
    keys={
        "num_experts": ("num_experts", "num_local_experts"), "num_experts_per_tok": ("moe_topk", "num_experts_per_tok"),
    },
    only={"moe_layer_num_skipped": (0,), "use_mixed_mlp_moe": (True,)},
    harmless={
        "read by no code of the class": (
            "num_shared_expert", "moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor", "moe_drop_tokens",
            "moe_random_routing_dropped_token", "capacity_factor", "group_limited_greedy", "n_group", "topk_group",
        ),
    },
)  # fmt: skip
_MODULES = ("mlp", *gated_modules("mlp.shared_mlp"), "mlp.gate", "mlp.gate.wg", "mlp.experts", "mlp.experts.act_fn")
FAMILIES = {
    "hunyuan_v1_moe": Definition(
        layer(Layer(LLAMA_NORM, NORMS_LAST.run, _mlp, f"{MODEL}, HunYuanMoEV1DecoderLayer.forward")), _tensors, _CONFIG,
        expert_modules=before_and_after(NORMS_AT_THE_END, _MODULES),
    )
}  # fmt: skip
