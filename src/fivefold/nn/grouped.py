"""Matrix products of rows that are grouped by expert, each group with its expert's matrix."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each group of rows times its expert's matrix, transposed.

    Float64 goes expert by expert, and widths that are not whole multiples of 16 bytes (a shard's may be): torch's
    grouped product does not have them.

    Args:
        x: `[rows, in]`, the rows of expert 0 first, then those of expert 1, ….
        weight: `[experts, out, in]`.
        counts: `[experts]`, int64, rows of each expert; some may have none.

    Returns:
        `[rows, out]`.
    """
    aligned = all(width * x.element_size() % 16 == 0 for width in weight.shape[1:])
    together = aligned and x.dtype != torch.float64
    return _together(x, weight, counts) if together else _one_by_one(x, weight, counts)


def _one_by_one(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    groups = torch.split(x, counts.tolist())
    return torch.cat([rows @ matrix.T for rows, matrix in zip(groups, weight.unbind(), strict=True)])


def _together(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    ends = counts.cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


class GroupedLinear(nn.Module):
    """A projection without bias for each of a number of experts."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """As `grouped_linear`."""
        return grouped_linear(x, self.weight, counts)
