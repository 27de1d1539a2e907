"""Mixture of experts: tokens go to the ranks of their experts (dispatch), and what these make of them comes
back and is summed (combine).

    from symmpool import experts

    buffer = experts.ExpertBuffer(hidden=7168, experts=256, top_k=8, max_tokens=4096)
    received, handle = buffer.dispatch(x, topk_ids, topk_weights)
    y = buffer.combine(run_experts(received), handle)

Expert `e` is on rank `e // (experts // world)`. `ExpertBuffer` has the calls; docs/experts.md begins from the
first one."""

from symmpool.experts.buffer import ExpertBuffer, combine, dispatch
from symmpool.experts.received import Handle, Received

__all__ = ["ExpertBuffer", "Handle", "Received", "combine", "dispatch"]
