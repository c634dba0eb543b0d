"""StarCoder 2: Llama's attention with biases, LayerNorms, and an MLP of two matrices."""

from functools import partial

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families.decoder import LAYER_NORM, Attention, layer, layer_of, two_layer_mlp
from zeroplan.transformer.families.definition import Definition
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.module_names import ATTENTION_MODULES, before_and_after
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, dense_block
from zeroplan.transformer.params_modules import layer_norm, linear

STARCODER2 = "transformers 5.23, models/starcoder2/modeling_starcoder2.py, Starcoder2"
_MLP = partial(two_layer_mlp, layers=("c_fc", "c_proj"))
_LAYER = layer(layer_of(STARCODER2, LAYER_NORM, Attention(f"{STARCODER2}Attention.forward").run, _MLP))


def _tensors(model: ModelSpec) -> Layout:
    hidden, width = model.hidden_size, model.intermediate_size
    mlp = (*linear("mlp.c_fc", hidden, width, bias=True), *linear("mlp.c_proj", width, hidden, bias=True))
    return alike(model, dense_block(model, bias=True, mlp=mlp, norm=layer_norm), layer_norm)


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 4096, "num_key_value_heads": 2, "tie_word_embeddings": True},
    fixed={"attention_bias": True, "mlp_bias": True},
    keys={"attention_bias": ("use_bias",), "mlp_bias": ("use_bias",)},
    dropout={"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    only={"use_bias": (True,), "norm_type": ("layer_norm",), "mlp_type": ("default",)},
    harmless={"numbers in a formula, which change no tensor": ("norm_epsilon",)},
)
_MODULES = before_and_after(ATTENTION_MODULES, ("mlp", "mlp.c_fc", "mlp.act", "mlp.c_proj"))
FAMILIES = {"starcoder2": Definition(_LAYER, _tensors, _CONFIG, _MODULES)}
