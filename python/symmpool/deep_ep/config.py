"""`Config`: how many SMs a call of normal mode may use, and numbers of DeepEP that mean nothing here."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from symmpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing import SupportsIndex

__all__ = ["Config"]


class Config:
    """The most SMs that kernels of a call take. The sizes of DeepEP's queues are kept as attributes: there
    are no queues here, as every row is written to its place at once."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ):
        self.num_sms = _count("num_sms", num_sms, 2)
        self.num_max_nvl_chunked_send_tokens = _count("nvl_send", num_max_nvl_chunked_send_tokens, 1)
        self.num_max_nvl_chunked_recv_tokens = _count("nvl_recv", num_max_nvl_chunked_recv_tokens, 1)
        self.num_max_rdma_chunked_send_tokens = _count("rdma_send", num_max_rdma_chunked_send_tokens, 1)
        self.num_max_rdma_chunked_recv_tokens = _count("rdma_recv", num_max_rdma_chunked_recv_tokens, 1)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: the memory of normal mode is made by the first call, which knows how many tokens there are."""
        _count("hidden_bytes", hidden_bytes, 1), _count("num_ranks", num_ranks, 1)
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0, as `get_nvl_buffer_size_hint`."""
        return self.get_nvl_buffer_size_hint(hidden_bytes, num_ranks)

    def __repr__(self) -> str:
        return (
            f"symmpool.deep_ep.Config({', '.join(f'{name}={value}' for name, value in vars(self).items())})"
        )


def _count(name: str, value: SupportsIndex, least: int) -> int:
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: an integer is needed, not {value!r}") from None
    if found < least:
        raise InvalidArgumentError(f"{name}={found}: {least} or more is needed")
    return found
