"""Sources of facts that several engines share: file and symbol, with the version."""

from zeroplan.spec.recipe import Recompute

_SAVED = "torch 2.13, torch/csrc/autograd/saved_variable.h, SavedVariable"
_CHECKPOINT = "torch 2.13, torch/utils/checkpoint.py"

#: The activations that blocks keep from their forward to their backward.
KEPT: dict[Recompute, str] = {
    "none": _SAVED,
    "selective": f"{_CHECKPOINT}, create_selective_checkpoint_contexts",
    "full": f"{_CHECKPOINT}, checkpoint",
}

#: A gradient that flows from one module to the module below.
FLOWING = "torch 2.13, torch/csrc/autograd/input_buffer.h, InputBuffer"

#: A parameter's gradient: autograd moves it to ``.grad`` or adds it to the existing one.
ACCUMULATE = "torch 2.13, torch/csrc/autograd/functions/accumulate_grad.h, AccumulateGrad"

#: Gradients of one tensor from several operators, added as they arrive.
INPUT_BUFFER = "torch 2.13, torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace"
