"""Expert parallel: each rank owns whole experts; tokens are sent to them and results back. No token is dropped.

Rows are sorted by expert, so the rows for one rank are contiguous. Three all-to-alls: the number of rows for each
expert, the rows, the results (GShard, Lepikhin et al. 2020; dropless: MegaBlocks, Gale et al. 2023). Every rank takes
part in each, even with no rows to send or to compute. Twin: ledger/expert.py.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from fivefold.nn.decoder import Decoder
from fivefold.nn.experts import Compute, Experts


def expert_parallel(decoder: Decoder, group: ProcessGroup) -> None:
    """Distributes the experts of every layer over `group`, in rank order."""
    for module in decoder.modules():
        if isinstance(module, Experts):
            module.exchange = Exchange(group)


class Exchange:
    """Dispatches rows to the ranks of their experts and combines the results; replaces `nn.experts.here`."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, compute: Compute, rows: Tensor, counts: Tensor) -> Tensor:
        ranks = self.group.size()
        sent = counts.view(ranks, -1)  # [rank, its experts]
        received = torch.empty_like(sent)  # [rank, this rank's experts]
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        leaving, arriving = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived: Tensor = _AllToAll.apply(rows, leaving, arriving, self.group)  # type: ignore[no-untyped-call]
        results = compute(arrived, received)
        returned: Tensor = _AllToAll.apply(results, arriving, leaving, self.group)  # type: ignore[no-untyped-call]
        return returned


class _AllToAll(torch.autograd.Function):
    """`[rows, hidden]`: the first `leaving[0]` rows go to rank 0, and so on; rows arrive in rank order."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, leaving: list[int], arriving: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.leaving, ctx.arriving, ctx.group = leaving, arriving, group
        return _all_to_all(rows, leaving, arriving, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.arriving, ctx.leaving, ctx.group), None, None, None


def _all_to_all(rows: Tensor, leaving: list[int], arriving: list[int], group: ProcessGroup) -> Tensor:
    received = rows.new_empty((sum(arriving), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), arriving, leaving, group=group)
    return received
