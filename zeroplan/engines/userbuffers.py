"""The buffers in which Transformer Engine overlaps products with exchanges between tensor-parallel ranks (``--tp-comm-overlap``).

They are outside torch's allocator. Tensors that an exchange makes in such a buffer still count in the allocator too, which is an
upper bound. Source: Transformer Engine d0067d0, pytorch/module/base.py, ``initialize_ub``; common/comm_gemm_overlap/
comm_gemm_overlap.cpp and userbuffers/userbuffers-host.cpp (read, not run).
"""

from zeroplan.engines.device import Outside
from zeroplan.ledger import Band
from zeroplan.numeric import ceil_div, round_up
from zeroplan.spec.job import JobSpec
from zeroplan.units import MIB

#: Buffers of a layer's products that gather their input, and of those that reduce and scatter their output.
_GATHERS, _SCATTERS = 8, 4
_PAGE = 2 * MIB
"""Buffers are whole pages of memory that multicast reaches. [bytes]"""
_FLAGS = 5 * MIB
"""Flags and pointers of each buffer's communicator, rounded up (``NVTE_REG0_FLAGS``). [bytes]"""


def overlap_buffers(job: JobSpec) -> tuple[Outside, ...]:
    """Return these buffers; none without the overlap. [bytes]

    Each has a micro-batch's hidden states: all tokens of this context-parallel rank. Those for gathered inputs are in FP8 if the
    layers are. A file of its own settings (``--tp-comm-overlap-cfg``) may exchange in a ring, whose reduce-scatter needs nearly
    twice as much: that much counts.
    """
    own, mesh, batch = job.recipe.megatron, job.mesh, job.batch
    if job.recipe.engine != "megatron" or not own.tp_comm_overlap:
        return ()
    elements = ceil_div(int(batch.micro_batch_size) * int(batch.seq_len), mesh.cp) * job.model.hidden_size
    gathered = (1 if own.fp8_format is not None else 2) * elements
    scattered = 2 * elements
    if own.tp_comm_overlap_cfg:
        scattered = scattered // mesh.tp * (2 * mesh.tp - 1)
    sizes = (_GATHERS * round_up(gathered, _PAGE), _SCATTERS * round_up(scattered, _PAGE))
    n_bytes = int(sum(sizes)) + (_GATHERS + _SCATTERS) * _FLAGS
    what = "Transformer Engine's buffers for products that overlap their exchange"
    return (
        Outside(what, Band(n_bytes, n_bytes, n_bytes), "Transformer Engine d0067d0, pytorch/module/base.py, initialize_ub"),
    )
