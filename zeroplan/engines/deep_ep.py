"""The buffers of DeepEP and HybridEP, which are outside torch's allocator, by their own arithmetic.

DeepEP: ``csrc/legacy/config.hpp``; HybridEP: DeepEP's branch hybrid-ep of 2026-07, ``csrc/hybrid_ep/buffer/``.
"""

from typing import NamedTuple

from zeroplan.engines.device import Outside
from zeroplan.errors import SpecError
from zeroplan.ledger import Band
from zeroplan.numeric import round_up
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import GATHERING, SENDING
from zeroplan.units import MIB

PEERS = 8
"""Ranks of one node, connected by NVLink."""
ALIGNMENT = 128
_INT, _FLOAT, _INDEX, _INT4, _SOURCE = 4, 4, 8, 16, 8
"""Sizes of numbers, of a vectorised copy of four, and of a token's source. [bytes]"""
_MOST_CHOICES = _MOST_SCALES = 128

#: By number of ranks: tokens sent at once over NVLink by dispatch, by combine; received there; (sent, received) over RDMA by each.
_TUNED = {
    2: (24, 10, 256, (6, 128), (6, 128)), 4: (6, 9, 256, (6, 128), (6, 128)), 8: (6, 4, 256, (6, 128), (6, 128)),
    16: (36, 4, 288, (20, 128), (12, 128)), 24: (32, 1, 288, (8, 128), (8, 128)), 32: (32, 1, 288, (8, 128), (8, 128)),
    48: (32, 1, 288, (8, 128), (8, 128)), 64: (32, 1, 288, (8, 128), (8, 128)), 96: (20, 1, 480, (12, 128), (8, 128)),
    128: (20, 1, 560, (12, 128), (8, 128)), 144: (32, 2, 720, (12, 128), (8, 128)), 160: (28, 2, 720, (12, 128), (8, 128)),
}  # fmt: skip


class Config(NamedTuple):
    """``deep_ep.Config``: multiprocessors, and the numbers of tokens sent and received at once."""

    num_sms: int
    num_max_nvl_chunked_send_tokens: int
    num_max_nvl_chunked_recv_tokens: int
    num_max_rdma_chunked_send_tokens: int
    num_max_rdma_chunked_recv_tokens: int

    @property
    def channels(self) -> int:
        """The number of channels; two multiprocessors serve one."""
        return self.num_sms // 2

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """The recommended buffer for NVLink, for tokens of ``hidden_bytes``. [bytes]"""
        nodes, peers = max(num_ranks // PEERS, 1), min(num_ranks, PEERS)
        tokens = self.num_max_nvl_chunked_recv_tokens
        each = (2 * nodes + 3) * _INT + tokens * (hidden_bytes + _beside_token())
        return int(round_up(self.channels * peers * each, ALIGNMENT))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """The recommended buffer for RDMA; 0 within a node. [bytes]"""
        if num_ranks <= PEERS:
            return 0
        sent = self.num_max_rdma_chunked_send_tokens
        tokens = int(round_up(self.num_max_rdma_chunked_recv_tokens, sent))
        each = (2 * PEERS + 2) * _INT + tokens * (hidden_bytes + _beside_token() + _INT4)
        return int(round_up(2 * self.channels * (num_ranks // PEERS) * each, ALIGNMENT))


def _beside_token() -> int:
    """The most bytes of metadata per token. [bytes]"""
    return _SOURCE + _MOST_CHOICES * (_INDEX + _FLOAT) + _MOST_SCALES * _FLOAT


def tuned(num_ranks: int, num_sms: int, *, combines: bool) -> Config:
    """DeepEP's recommended settings for a number of ranks."""
    if num_ranks not in _TUNED:
        raise AssertionError(f"Unsupported number of EP ranks: {num_ranks}")
    dispatched, combined, received, *over_rdma = _TUNED[num_ranks]
    return Config(num_sms, combined if combines else dispatched, received, *over_rdma[combines])


def low_latency_bytes(tokens: int, hidden: int, experts: int) -> int:
    """The required buffer for low-latency kernels, double-buffered. [bytes]"""
    scales = hidden // 128
    dispatched = _INT4 + max(2 * hidden, hidden + scales * _FLOAT)
    combined = scales * 4 + 2 * hidden
    sent = max(tokens * dispatched, experts * tokens * combined)
    received = experts * tokens * max(dispatched, combined)
    return 2 * (sent + received + int(round_up(experts * _INT, ALIGNMENT)))


def low_latency_hint(tokens: int, hidden: int, experts: int) -> int:
    """``low_latency_bytes``, rounded up by one more alignment unit. [bytes]"""
    return (low_latency_bytes(tokens, hidden, experts) + ALIGNMENT) // ALIGNMENT * ALIGNMENT


_WORKSPACE = 32 * MIB
_HEAP = 512 * MIB
"""NVSHMEM's heap grows in pieces of this size. [bytes]"""
_SMS = 20
"""NeMo AutoModel's ``BackendConfig.dispatcher_num_sms``; Megatron-Core's default (token_dispatcher.py, _DeepepManager)."""


def expert_buffers(job: JobSpec) -> tuple[Outside, ...]:
    """Return the buffers through which kernels send tokens to experts on other ranks; none without such kernels. [bytes]

    Raises SpecError for a number of ranks for which DeepEP has no settings.
    """
    if job.recipe.engine == "megatron":
        own, ranks = job.recipe.megatron, job.mesh.ep * job.recipe.megatron.expert_ways(job.mesh.tp)
        sends = own.moe_token_dispatcher_type == "deepep" and ranks > 1 and job.model.moe is not None  # noqa: S105  tokens of text
        return (_of_deep_ep(ranks, 2 * job.model.hidden_size),) if sends else ()
    ep, kernels = job.mesh.ep, (SENDING - GATHERING) & set(job.recipe.fused_parts)
    if ep == 1 or not kernels:
        return ()
    return (_of_hybrid_ep(job) if "hybridep" in kernels else _of_deep_ep(ep, 2 * job.model.width_of_experts),)


def _of_deep_ep(ep: int, token: int) -> Outside:
    if ep not in _TUNED:
        raise SpecError(f"DeepEP has no settings for ep={ep}; use one of {', '.join(map(str, _TUNED))}")
    both = [tuned(ep, _SMS, combines=combines) for combines in (False, True)]
    near = max(one.get_nvl_buffer_size_hint(token, ep) for one in both)
    far = int(round_up(max(one.get_rdma_buffer_size_hint(token, ep) for one in both), _HEAP))
    sure = near + _WORKSPACE
    return Outside(
        "DeepEP's buffers", Band(sure + far, sure + far, sure + far + (_HEAP if far else 0)), "DeepEP, csrc/legacy/buffer.hpp"
    )


def _of_hybrid_ep(job: JobSpec) -> Outside:
    """Return HybridEP's: room for all tokens of all ranks, and copies to and from other nodes of eight ranks. [bytes]

    The lowest value has all ranks in one NVLink domain.
    """
    ep, hidden, experts = job.mesh.ep, job.model.width_of_experts, 0 if job.model.moe is None else job.model.moe.num_experts
    tokens = int(job.batch.micro_batch_size * job.batch.seq_len) // job.mesh.cp
    whole = tokens * ep * (2 * hidden + 4 * experts + 4 * (hidden // 128))
    others = max(ep // PEERS, 1) - 1
    beyond = tokens * (2 * hidden + 4 * experts) * (1 + 3 * others) if others else 0
    source = "DeepEP, branch hybrid-ep, csrc/hybrid_ep/buffer/intranode.cu and internode_doca.cu"
    return Outside("HybridEP's buffers", Band(whole, whole + beyond, whole + beyond), source)
