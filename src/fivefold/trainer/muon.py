"""Muon (Jordan et al. 2024) on sharded matrices: each matrix is gathered to one of the ranks that hold parts of it, and
orthogonalised there.

The update of a matrix is its momentum, orthogonalised by torch.optim.Muon and scaled to the size of AdamW's updates
(Liu et al. 2025), so that one learning rate serves both. Momentum is sharded like the parameter. Matrices travel to
their owners in two all-to-alls, over the ZeRO group and then over the tensor-parallel group, and the updates return
in two others. They travel in bf16, to which torch.optim.Muon rounds its input anyway. Twin: ledger/muon.py.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fivefold.config.tree import Optimizer
from fivefold.parallel.local import LocalParameter, Piece
from fivefold.spec.matrices import is_matrix, owners, work
from fivefold.spec.parts import Part


class Muon:
    """Momentum and updates of the matrices among a rank's parameters."""

    def __init__(self, options: Optimizer, parameters: Sequence[LocalParameter]) -> None:
        """Collective if matrices are sharded."""
        self.options = options
        self.parameters = [parameter for parameter in parameters if is_matrix(parameter.spec)]
        self.momenta = [torch.zeros_like(parameter.value) for parameter in self.parameters]
        shapes = {index: parameter.spec.shape for index, parameter in enumerate(self.parameters)}
        device = parameters[0].value.device

        def over(group: ProcessGroup | None) -> Exchange:
            parts = {index: p.part for index, p in enumerate(self.parameters) if p.shards is group}
            return Exchange(group, parts, shapes, device)

        self._over_shards = [over(group) for group in dict.fromkeys(p.shards for p in self.parameters)]
        owned = {index: part for exchange in self._over_shards for index, part in exchange.owned.items()}
        tensor = self.parameters[0].tensor if self.parameters else None
        self._over_tensor = Exchange(tensor, dict(sorted(owned.items())), shapes, device)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update with the gradients in the values' `grad`. Collective."""
        pairs = zip(self.parameters, self.momenta, strict=True)
        ahead = {index: self._look_ahead(*pair) for index, pair in enumerate(pairs)}
        parts = {i: part for exchange in self._over_shards for i, part in exchange.gather(ahead).items()}
        wholes = self._over_tensor.gather(parts)
        steps = self._over_tensor.scatter({index: direction(whole) for index, whole in wholes.items()})
        for exchange in self._over_shards:
            for index, step in exchange.scatter(steps).items():
                value, spec = self.parameters[index].value, self.parameters[index].spec
                decay = 0.0 if spec.role in self.options.no_decay else self.options.weight_decay
                value.mul_(1 - learning_rate * decay).add_(step, alpha=learning_rate * scale(spec.shape))

    def state(self) -> dict[str, Piece]:
        """Momentum by global name, laid out like the parameters."""
        pairs = zip(self.parameters, self.momenta, strict=True)
        return {f"{p.spec.name}.momentum_buffer": p.piece(momentum) for p, momentum in pairs}

    def _look_ahead(self, parameter: LocalParameter, momentum: Tensor) -> Tensor:
        """Updates the momentum; returns what is to be orthogonalised (Nesterov's look-ahead), in bf16."""
        gradient = parameter.value.grad
        if gradient is None:  # an expert that received no token
            gradient = torch.zeros_like(momentum)
        momentum.lerp_(gradient, 1 - self.options.momentum)
        return gradient.lerp(momentum, self.options.momentum).bfloat16()


def scale(shape: Sequence[int]) -> float:
    """The factor that scales an orthogonal matrix to the size of an AdamW update (Liu et al. 2025, eq. 4)."""
    return 0.2 * sqrt(max(shape[-2:]))


def direction(whole: Tensor) -> Tensor:
    """Approximately −U·Vᵀ for a bf16 matrix U·S·Vᵀ, or for each of `[experts, rows, columns]`: the update that
    torch.optim.Muon applies to a zero matrix, at the learning rate that cancels its scale."""
    if whole.dim() == 3:
        return torch.stack([direction(matrix) for matrix in whole])
    moved = nn.Parameter(torch.zeros_like(whole))
    moved.grad = whole
    torch.optim.Muon(
        [moved],
        lr=1 / scale(whole.shape),
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    ).step()  # type: ignore[no-untyped-call]
    return moved.detach()


class Exchange:
    """Gathers matrices, whose parts the ranks of a group hold, to their owners, and scatters the results back.

    Attributes:
        owned: the matrices this rank owns, by number: the box around the parts of all ranks.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        parts: Mapping[int, Part],
        shapes: Mapping[int, Sequence[int]],
        device: torch.device,
    ) -> None:
        """Collective.

        Args:
            group: ranks that each hold a part of the matrices; None = this rank holds them whole.
            parts: this rank's part of each matrix, by numbers that are the same on every rank of the group.
            shapes: of the whole parameters, by number.
        """
        self._group = group if parts else None
        self._device = device
        self.owned = dict(parts)
        if self._group is None:
            return
        ranks = self._group.size()
        everyone: list[dict[int, Part]] = [{}] * ranks
        dist.all_gather_object(everyone, dict(parts), group=self._group)
        self._parts = everyone
        self._given = _given(everyone)
        boxes = {index: _box_around([of_rank[index] for of_rank in everyone]) for index in parts}
        whole = [(*box.shape[:-2], *shapes[index][-2:]) for index, box in boxes.items()]
        owner = dict(zip(boxes, owners([work(shape) for shape in whole], ranks), strict=True))
        self._owned = [{i: box for i, box in boxes.items() if owner[i] == rank} for rank in range(ranks)]
        self.owned = self._owned[self._group.rank()]

    def gather(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The matrices that this rank owns, assembled from every rank's parts in `tensors`. If several ranks hold the
        same part, only the first of them sends it."""
        if self._group is None:
            return {index: tensors[index] for index in self.owned}
        given = self._given[self._group.rank()]
        received = self._exchange(
            [[tensors[i].flatten()[: given[i].numel] for i in of_rank] for of_rank in self._owned],
            [[of_rank[i].numel for i in self.owned] for of_rank in self._given],
        )
        wholes = {}
        for place, (index, box) in enumerate(self.owned.items()):
            wholes[index] = tensors[index].new_empty(box.shape)
            for of_rank, pieces in zip(self._given, received, strict=True):
                _view(wholes[index], of_rank[index], box).copy_(pieces[place].view(of_rank[index].shape))
        return wholes

    def scatter(self, wholes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """This rank's parts of the matrices that their owners have in `wholes`."""
        if self._group is None:
            return {index: wholes[index] for index in self.owned}
        mine = self._parts[self._group.rank()]
        received = self._exchange(
            [
                [_view(wholes[i], of_rank[i], box).flatten() for i, box in self.owned.items()]
                for of_rank in self._parts
            ],
            [[mine[index].numel for index in of_rank] for of_rank in self._owned],
        )
        return {
            index: piece.view(mine[index].shape)
            for of_rank, pieces in zip(self._owned, received, strict=True)
            for index, piece in zip(of_rank, pieces, strict=True)
        }

    def _exchange(self, sent: list[list[Tensor]], sizes: list[list[int]]) -> list[list[Tensor]]:
        """One all-to-all: the pieces received from each rank, whose numbers of elements are `sizes`."""
        empty = torch.empty(0, dtype=torch.bfloat16, device=self._device)
        outgoing = torch.cat([empty, *(piece for pieces in sent for piece in pieces)])
        incoming = empty.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            incoming,
            outgoing,
            output_split_sizes=[sum(of_rank) for of_rank in sizes],
            input_split_sizes=[sum(piece.numel() for piece in pieces) for pieces in sent],
            group=self._group,
        )
        ends = list(accumulate(map(sum, sizes), initial=0))
        return [
            list(torch.split(incoming[start:end], of_rank))
            for (start, end), of_rank in zip(pairwise(ends), sizes, strict=True)
        ]


def _given(parts: Sequence[Mapping[int, Part]]) -> list[dict[int, Part]]:
    """What each rank sends of its parts: nothing of a part that an earlier rank holds as well."""
    found: list[dict[int, Part]] = []
    seen: set[tuple[int, Part]] = set()
    for of_rank in parts:
        found.append({i: part.narrow(0, 0, 0) if (i, part) in seen else part for i, part in of_rank.items()})
        seen.update(of_rank.items())
    return found


def _box_around(parts: Sequence[Part]) -> Part:
    """The smallest box around all parts that hold something."""
    held = [part for part in parts if part.numel]
    low = tuple(min(starts) for starts in zip(*(part.starts for part in held), strict=True))
    ends = ([s + n for s, n in zip(part.starts, part.shape, strict=True)] for part in held)
    return Part(low, tuple(max(end) - start for start, *end in zip(low, *ends, strict=True)))


def _view(whole: Tensor, part: Part, box: Part) -> Tensor:
    """A part's view of `whole`, the tensor of the box `box`."""
    if not part.numel:
        return whole.new_empty(part.shape)
    for dim, (start, size) in enumerate(zip(part.starts, part.shape, strict=True)):
        whole = whole.narrow(dim, start - box.starts[dim], size)
    return whole
