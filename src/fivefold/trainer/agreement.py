"""Sums over all ranks, for decisions that all ranks must make alike."""

import torch
import torch.distributed as dist


class Agreement:
    """Sums over all ranks of the run. Every rank gets the same bits, so decisions based on them agree: a NaN on one
    rank is a NaN on all, and a flag raised on one rank is seen by all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def sum(self, *values: float) -> list[float]:
        """The sum of each value over the ranks, in float64 (exact for counts below 2^53)."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return list(values)
        packed = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(packed)
        return packed.tolist()
