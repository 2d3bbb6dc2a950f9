"""Numbers that every rank must share before it acts on them."""

import torch
import torch.distributed as dist


class Agreement:
    """Sums over all ranks of the run. Every rank gets the same bits, so what follows from them is agreed:
    a NaN anywhere is a NaN everywhere, a flag raised on one rank is seen by all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def sum(self, *values: float) -> list[float]:
        """The sum of each value over the ranks, in float64 (exact for counts below 2^53)."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return list(values)
        packed = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(packed)
        return packed.tolist()
