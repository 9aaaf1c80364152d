"""Config and the sizes that DeepEP's users ask for before they make a Buffer.

The figures are DeepEP's, so that budgets which frameworks make of them stay what they were. Turnout takes of a Config its num_sms, and the
memory that it needs.
"""

from __future__ import annotations

from ..errors import InvalidArgument

__all__ = ["Config", "combine_config", "dispatch_config", "low_latency_size_hint"]

_NODE = 8  # GPUs of a node, as DeepEP counts
_MAX_TOPK, _MAX_SCALES, _META_BYTES, _ALIGN = 128, 128, 8, 128

# Ranks: chunks of dispatch, chunks of combine (nvl_send, nvl_recv, rdma_send, rdma_recv).
_TABLE = {
    2: ((24, 256, 6, 128), (10, 256, 6, 128)),
    4: ((6, 256, 6, 128), (9, 256, 6, 128)),
    8: ((6, 256, 6, 128), (4, 256, 6, 128)),
    16: ((36, 288, 20, 128), (4, 288, 12, 128)),
    24: ((32, 288, 8, 128), (1, 288, 8, 128)),
    32: ((32, 288, 8, 128), (1, 288, 8, 128)),
    48: ((32, 288, 8, 128), (1, 288, 8, 128)),
    64: ((32, 288, 8, 128), (1, 288, 8, 128)),
    96: ((20, 480, 12, 128), (1, 480, 8, 128)),
    128: ((20, 560, 12, 128), (1, 560, 8, 128)),
    144: ((32, 720, 12, 128), (2, 720, 8, 128)),
    160: ((28, 720, 12, 128), (2, 720, 8, 128)),
}
_OTHERS = ((6, 256, 6, 128), (6, 256, 6, 128))


class Config:
    """How many multiprocessors a call of DeepEP takes, and how it cuts its messages. Of these only num_sms means something to Turnout."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        for name, value in list(locals().items())[1:]:
            if not isinstance(value, int) or value < 0:
                raise InvalidArgument(f"Config: {name} is {value!r}, but must be a whole number, 0 or more")
        if num_max_nvl_chunked_send_tokens >= num_max_nvl_chunked_recv_tokens:
            raise InvalidArgument(
                f"Config: num_max_nvl_chunked_send_tokens is {num_max_nvl_chunked_send_tokens}, but must be less than "
                f"num_max_nvl_chunked_recv_tokens, {num_max_nvl_chunked_recv_tokens}"
            )
        if 2 * num_max_rdma_chunked_send_tokens > num_max_rdma_chunked_recv_tokens:
            raise InvalidArgument(
                f"Config: num_max_rdma_chunked_send_tokens is {num_max_rdma_chunked_send_tokens}, but must be at most half of "
                f"num_max_rdma_chunked_recv_tokens, {num_max_rdma_chunked_recv_tokens}"
            )
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of DeepEP's num_nvl_bytes for rows of hidden_bytes, at most 128 experts per token and 128 scales per row."""
        peers, nodes = min(num_ranks, _NODE), max(-(-num_ranks // _NODE), 1)
        queues = self.num_sms // 2 * peers
        counters = queues * (2 * nodes + 3) * 4
        return _align(counters + queues * self.num_max_nvl_chunked_recv_tokens * _row_bytes(hidden_bytes))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of DeepEP's num_rdma_bytes; 0 for the ranks of one node."""
        if num_ranks <= _NODE:
            return 0
        nodes, channels = -(-num_ranks // _NODE), self.num_sms // 2
        queues = channels * nodes
        counters = queues * (_NODE * 2 + 2) * 2 * 4
        return _align(counters + queues * self.num_max_rdma_chunked_recv_tokens * _row_bytes(hidden_bytes) * 2)


def _row_bytes(hidden_bytes: int) -> int:
    return hidden_bytes + _META_BYTES + _MAX_TOPK * (8 + 4) + _MAX_SCALES * 4


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def dispatch_config(num_ranks: int, num_sms: int) -> Config:
    return Config(num_sms, *_TABLE.get(num_ranks, _OTHERS)[0])


def combine_config(num_ranks: int, num_sms: int) -> Config:
    return Config(num_sms, *_TABLE.get(num_ranks, _OTHERS)[1])


def low_latency_size_hint(max_tokens: int, hidden: int, num_experts: int) -> int:
    """Two sets of send slots, receive slots and signals."""
    scales = -(-hidden // 128) * 4
    dispatched, combined = 16 + max(2 * hidden, hidden + scales), scales + 2 * hidden
    send = max(max_tokens * dispatched, num_experts * max_tokens * combined)
    receive = num_experts * max_tokens * max(dispatched, combined)
    return _align(2 * (send + receive + _align(4 * num_experts)))
