"""What lines of a block have in common: their kinds, tags that engines know them by, and the source of the residual stream."""

from zeroplan.ledger import Kind, Role, Tag

SAVED = Kind.ACTIVATIONS
GRADIENT = Kind.ACTIVATION_GRADIENTS
TEMPORARY = Kind.TEMPORARY
BLOCK_INPUT, INCOMING = Tag(Role.BLOCK_INPUT), Tag(Role.INCOMING)

LAYER = "transformers 5.23, models/llama/modeling_llama.py, LlamaDecoderLayer.forward"
