"""What do DeepSpeed's own estimators print for a model, so that a reader can compare?

DeepSpeed prints "memory needed for params, optim states and gradients" with its unit written GB and divided by 2**30. The
formulas leave out activations, logits, reduce buckets and their copies, gathered parameters beyond one layer, gradients of
whole parameters at a partition's border, and every temporary; the optimizer is Adam in mixed precision.
"""

from zeroplan.numeric import Int

#: Bytes per parameter that ZeRO-2 shards: 2 gradients, 4 fp32 gradients, 4 fp32 weights, 8 Adam (DeepSpeed 0.19.8); the
#: printouts in DeepSpeed's documentation are older: 4 unsharded and 16 sharded.
_SHARDED = 18
_DOCUMENTED_UNSHARDED, _DOCUMENTED_SHARDED = 4, 16


def zero2_estimate(parameters: Int, *, n_gpus: Int, offload_optimizer: bool = False) -> Int:
    """GPU memory as DeepSpeed estimates it for ZeRO-2. [bytes]

    2·Ψ + 18·Ψ/N, or 2·Ψ with the optimizer on the host. Source: DeepSpeed 0.19.8, ``runtime/zero/stage_1_and_2.py``,
    ``estimate_zero2_model_states_mem_needs``.

    >>> zero2_estimate(10**9, n_gpus=8)
    4250000000
    """
    return 2 * parameters + (0 if offload_optimizer else _SHARDED * parameters // n_gpus)


def zero2_estimate_documented(parameters: Int, *, n_gpus: Int, offload_optimizer: bool = False) -> Int:
    """GPU memory as the printouts in DeepSpeed's documentation have it for ZeRO-2. [bytes]

    4·Ψ + 16·Ψ/N, or 2·Ψ with the optimizer on the host: the estimator of the release that printed them, replaced since.
    Source: DeepSpeed documentation, "Memory Requirements", section on ZeRO-2.

    >>> zero2_estimate_documented(10**9, n_gpus=8)
    6000000000
    """
    if offload_optimizer:
        return 2 * parameters
    return _DOCUMENTED_UNSHARDED * parameters + _DOCUMENTED_SHARDED * parameters // n_gpus


def zero3_estimate(
    parameters: Int, largest_layer: Int, *, n_gpus: Int, offload_optimizer: bool = False, offload_param: bool = False
) -> Int:
    """GPU memory as DeepSpeed estimates it for ZeRO-3. [bytes]

    ``largest_layer`` is the parameter count of the module with the most parameters of its own. 4 times that (its weights
    and their gradient), and 18·Ψ/N; 2·Ψ/N with the optimizer on the host; nothing more with the parameters there too.
    Source: DeepSpeed 0.19.8, ``runtime/zero/stage3.py``, ``estimate_zero3_model_states_mem_needs``.

    >>> zero3_estimate(10**9, 10**7, n_gpus=8)
    2290000000
    """
    layer = 4 * largest_layer
    if offload_optimizer and offload_param:
        return layer
    return layer + (2 if offload_optimizer else _SHARDED) * parameters // n_gpus
