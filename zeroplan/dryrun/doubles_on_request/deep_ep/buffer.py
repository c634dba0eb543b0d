"""``deep_ep.Buffer``: shapes of its results, and its allocations through torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from zeroplan.dryrun import outside_buffers
from zeroplan.dryrun.replacements import note
from zeroplan.engines import deep_ep as sizes
from zeroplan.engines.deep_ep import ALIGNMENT, PEERS, Config
from zeroplan.verify.fake_cuda.known_values import Sure, keep

from .memory import allocations
from .routes import Layout, Ranks, layout, per_local_expert, received
from .utils import EventHandle, EventOverlap

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Tokens in 16 bits, or in 8 bits with their scales."""
Handle = tuple[Any, ...]
Hook = Callable[[], None] | None
Dispatched = tuple[Tokens, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle | None, EventOverlap]
"""The received tokens, their experts and weights, the count of each expert, the handle for combine, and an event."""
_SOURCE_BYTES = 8


class Buffer:
    """Buffers of one group of ranks, and the exchange of tokens through them.

    No data is sent. Every other rank is assumed to send as many tokens as this rank sends to itself.
    """

    num_sms: int = 20
    explicitly_destroy = True

    def __init__(
        self, group: dist.ProcessGroup | None, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,  # noqa: FBT001, FBT002
        num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,  # noqa: ARG002, FBT001, FBT002
        explicitly_destroy: bool = False, enable_shrink: bool = False, comm: object = None,  # noqa: ARG002, FBT001, FBT002
    ) -> None:  # fmt: skip
        self._buffers: list[Any] = []
        if group is None:
            raise ValueError("deep_ep.Buffer without a process group (MPI) is not supported in a dry run; pass a process group")
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self._check()
        self._ranks = Ranks(self.rank, self.group_size, max(1, self.group_size // PEERS))
        self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        note("DeepEP", "its results' shapes: each rank sends what this one sends, and buffers count outside the allocator")
        self._buffers += allocations(num_nvl_bytes, num_rdma_bytes)
        outside_buffers.take(self._buffers)

    def _check(self) -> None:
        size = self.group_size
        if size > PEERS and size % PEERS:
            raise RuntimeError(f"DeepEP needs up to {PEERS} ranks or whole nodes of {PEERS}, not {size} ranks")
        if self.num_nvl_bytes % ALIGNMENT or self.num_rdma_bytes % ALIGNMENT:
            raise RuntimeError(f"the sizes of DeepEP's buffers must be multiples of {ALIGNMENT} bytes")
        if self.num_rdma_bytes and size <= PEERS and not self.low_latency_mode:
            raise RuntimeError("DeepEP uses a buffer for RDMA only between nodes or in low-latency mode")

    def destroy(self) -> None:
        """Free the buffers."""
        if not self.explicitly_destroy:
            raise AssertionError("`explicitly_destroy` flag must be set")
        self._give_back()

    def _give_back(self) -> None:
        outside_buffers.give_back(self._buffers)
        self._buffers = []

    def __del__(self) -> None:
        """Free the buffers, unless the script frees them explicitly."""
        if not self.explicitly_destroy:
            self._give_back()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"deep_ep.Buffer.{name} is not supported in a dry run")

    # --- settings -------------------------------------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: kernels for Hopper are available."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the number of multiprocessors for the kernels."""
        if new_num_sms % 2:
            raise AssertionError("The SM count must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """DeepEP's recommended settings for dispatch."""
        return sizes.tuned(num_ranks, Buffer.num_sms, combines=False)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """DeepEP's recommended settings for combine."""
        return sizes.tuned(num_ranks, Buffer.num_sms, combines=True)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int,  # noqa: ARG004
    ) -> int:  # fmt: skip
        """The required size of the buffer for low-latency kernels. [bytes]"""
        return sizes.low_latency_hint(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of the exchange."""
        return self._stream

    # --- between training ranks -----------------------------------------------------------------------------------------

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: EventOverlap | None = None, async_finish: bool = False,  # noqa: FBT001, FBT002
        allocate_on_comm_stream: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:  # fmt: skip
        """Count the tokens for each rank, node and expert."""
        found = layout(topk_idx, num_experts, self._ranks)
        with self._exchange(previous_event, asynchronous=async_finish, there=allocate_on_comm_stream) as event:
            per_rank = _holding(_ints(self.group_size), found.per_rank, found.sure)
            per_expert = _holding(_ints(num_experts), found.per_expert, found.sure)
            in_rank = _holding(_empty(len(topk_idx), self.group_size, dtype=torch.bool), found.in_rank, found.sure)
            per_node = _holding(_ints(self._ranks.nodes), found.per_node, found.sure) if self._between_nodes else None
        return per_rank, per_node, per_expert, in_rank, event

    def dispatch(
        self, x: Tokens, handle: Handle | None = None, num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None, is_token_in_rank: torch.Tensor | None = None,  # noqa: ARG002
        num_tokens_per_expert: torch.Tensor | None = None, topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
        config: Config | None = None, previous_event: EventOverlap | None = None, async_finish: bool = False,  # noqa: FBT001, FBT002
        allocate_on_comm_stream: bool = False,  # noqa: FBT001, FBT002
    ) -> Dispatched:  # fmt: skip
        """Send tokens to their experts."""
        channels = (config or self.get_dispatch_config(self.group_size)).channels
        with self._exchange(previous_event, asynchronous=async_finish, there=allocate_on_comm_stream) as event:
            if handle is not None:
                return self._again(x, handle, channels), None, None, None, None, event
            if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
                raise AssertionError("dispatch needs the results of get_dispatch_layout, or a handle")
            if topk_idx is None or topk_weights is None:
                raise NotImplementedError(
                    "deep_ep.Buffer.dispatch without topk_idx and topk_weights is not supported in a dry run"
                )
            found = layout(topk_idx, len(num_tokens_per_expert), self._ranks)
            arrived = received(found, self._ranks)
            count = num_worst_tokens or len(arrived)
            made = self._handle(len(topk_idx), count, channels, found, is_token_in_rank)
            tokens, weights = _like(x, count), _like(topk_weights, count)
            local = len(num_tokens_per_expert) // self.group_size
            if num_worst_tokens:
                return tokens, _like(topk_idx, count), weights, [], made, event
            chosen = _holding(_like(topk_idx, count), arrived, _on_arrival(found))
            return tokens, chosen, weights, per_local_expert(arrived, local, expert_alignment), made, event

    def combine(
        self, x: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None, bias: object = None,  # noqa: ARG002
        config: Config | None = None, previous_event: EventOverlap | None = None, async_finish: bool = False,  # noqa: ARG002, FBT001, FBT002
        allocate_on_comm_stream: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:  # fmt: skip
        """Send tokens back to their ranks, and sum them."""
        sent = handle[0] if self._between_nodes else handle[5]
        with self._exchange(previous_event, asynchronous=async_finish, there=allocate_on_comm_stream) as event:
            weights = None if topk_weights is None else _like(topk_weights, len(sent))
            return _like(x, len(sent)), weights, event

    def _handle(self, sent: int, count: int, channels: int, found: Layout, is_token_in_rank: torch.Tensor) -> Handle:
        """The tensors that a dispatch keeps for combine."""
        ranks, nodes = self.group_size, self._ranks.nodes
        if not self._between_nodes:
            return (
                _ints(ranks, ranks), _ints(ranks, channels), _ints(ranks, channels), _ints(count), is_token_in_rank,
                _ints(sent, ranks),
            )  # fmt: skip
        over_rdma = int(found.per_node[self.rank // PEERS]) * nodes
        return (
            is_token_in_rank, _ints(nodes, channels), _ints(ranks, channels), _ints(nodes, channels), _ints(nodes),
            _ints(ranks, channels), _ints(ranks), _empty(count, _SOURCE_BYTES, dtype=torch.uint8), _ints(sent, nodes),
            _ints(over_rdma, PEERS),
        )  # fmt: skip

    def _again(self, x: Tokens, handle: Handle, channels: int) -> Tokens:
        """Send other tokens along an earlier dispatch's route; within a node the kernel rewrites its bookkeeping."""
        if self._between_nodes:
            return cast("Tokens", _like(x, len(handle[7])))
        tokens, _ = _parts(x)
        arrived = cast("Tokens", _like(x, len(handle[3])))
        _bookkeeping = _ints(len(handle[3])), _ints(self.group_size, channels), _ints(len(tokens), self.group_size)
        return arrived

    @property
    def _between_nodes(self) -> bool:
        return self._ranks.nodes > 1

    # --- with low latency -----------------------------------------------------------------------------------------------

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing."""

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,  # noqa: ARG002
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None, use_fp8: bool = True, round_scale: bool = False,  # noqa: ARG002, FBT001, FBT002
        use_ue8m0: bool = False, async_finish: bool = False, return_recv_hook: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[Tokens, torch.Tensor, Handle, EventOverlap, Hook]:  # fmt: skip
        """Send tokens to their experts; each expert's buffer has room for the maximum."""
        most, hidden = num_max_dispatch_tokens_per_rank, x.shape[1]
        self._check_low_latency(len(x), most, hidden, num_experts)
        local, room = num_experts // self.group_size, self.group_size * most
        with self._exchange(None, asynchronous=async_finish, there=False) as event:
            arrived = _empty(local, room, hidden, dtype=torch.float8_e4m3fn if use_fp8 else torch.bfloat16)
            source, ranges = _ints(local, room), _empty(local, self.group_size, dtype=torch.int64)
            counts = self._counts(topk_idx, num_experts, room)
            handle = (source, ranges, most, hidden, num_experts)
            found: Tokens = arrived
            if use_fp8:
                grain, dtype = (512, torch.int32) if use_ue8m0 else (128, torch.float32)
                found = arrived, _empty(local, hidden // grain, room, dtype=dtype).transpose(1, 2)
        return found, counts, handle, event, _hook(wanted=return_recv_hook)

    def _check_low_latency(self, tokens: int, most: int, hidden: int, experts: int) -> None:
        if tokens > most:
            raise RuntimeError(f"{tokens} tokens are more than num_max_dispatch_tokens_per_rank, which is {most}")
        if (needs := sizes.low_latency_bytes(most, hidden, experts)) > self.num_rdma_bytes:
            raise RuntimeError(
                f"DeepEP's low-latency kernels need {needs} bytes for RDMA, and the buffer has {self.num_rdma_bytes}"
            )

    def _counts(self, topk_idx: torch.Tensor, experts: int, room: int) -> torch.Tensor:
        found = layout(topk_idx, experts, self._ranks)
        local = experts // self.group_size
        counts = torch.tensor(per_local_expert(received(found, self._ranks), local, 1), device="cpu").clamp(max=room)
        return _holding(_ints(local), counts, _on_arrival(found))

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Handle,  # noqa: ARG002
        use_logfmt: bool = False, zero_copy: bool = False, async_finish: bool = False, return_recv_hook: bool = False,  # noqa: ARG002, FBT001, FBT002
        out: torch.Tensor | None = None, combine_wait_recv_cost_stats: torch.Tensor | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, EventOverlap, Hook]:  # fmt: skip
        """Send tokens back and sum them with their weights."""
        with self._exchange(None, asynchronous=async_finish, there=False) as event:
            combined = out if out is not None else _empty(len(topk_weights), x.shape[2], dtype=x.dtype)
        return combined, event, _hook(wanted=return_recv_hook)

    @contextmanager
    def _exchange(self, before: EventOverlap | None, *, asynchronous: bool, there: bool) -> Iterator[EventOverlap]:
        """Run an exchange on its stream: wait, allocate on the right stream, and set the returned event."""
        current = torch.cuda.current_stream()
        if there and (before is None or not asynchronous):
            raise AssertionError("allocate_on_comm_stream needs previous_event and async_finish")
        if before is None or before.event is None:
            self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream if there else current), torch.no_grad():
            event = EventOverlap()
            yield event
        with torch.cuda.stream(self._stream):
            event.event = EventHandle() if asynchronous else None
        if not asynchronous:
            current.wait_stream(self._stream)


def _parts(x: Tokens) -> tuple[torch.Tensor, torch.Tensor | None]:
    return x if isinstance(x, tuple) else (x, None)


def _on_arrival(found: Layout) -> Sure:
    """How certain the number of received tokens is."""
    return Sure.EXACT if found.sure is Sure.EXACT else Sure.EXCHANGED


def _like(x: Tokens, count: int) -> Any:  # noqa: ANN401  tokens as they came
    """Empty tensors for the received tokens, and their scales."""
    tokens, scales = _parts(x)
    found = tokens.new_empty((count, *tokens.shape[1:]))
    return found if scales is None else (found, scales.new_empty((count, *scales.shape[1:])))


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _ints(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.int32)


def _holding(tensor: torch.Tensor, values: torch.Tensor, sure: Sure) -> torch.Tensor:
    keep(cast("FakeTensor", tensor), values.to(tensor.dtype), sure)
    return tensor


def _hook(*, wanted: bool) -> Hook:
    return (lambda: None) if wanted else None
