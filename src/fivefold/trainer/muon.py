"""Muon (Jordan et al. 2024) on divided matrices: each is orthogonalised whole, on one rank of those that hold it.

The step of a matrix is its momentum, orthogonalised by torch.optim.Muon and scaled to the size AdamW's steps have
(Liu et al. 2025), so that one learning rate serves both. Momentum stays where the parameter is. What is to be
orthogonalised goes to its owners in two all-to-alls: the shards of ZeRO together to one of their ranks, then what
tensor parallel has divided to one of its; the steps come back in two others. On the way it is bf16, to which torch
rounds it first. Twin: ledger/muon.py.
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
    """Momentum and steps of the matrices among a rank's parameters."""

    def __init__(self, options: Optimizer, parameters: Sequence[LocalParameter]) -> None:
        """Collective where matrices are divided."""
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
        """Lets momentum follow the gradient; what is to be orthogonalised (Nesterov's look ahead), in bf16."""
        gradient = parameter.value.grad
        if gradient is None:  # no token came by
            gradient = torch.zeros_like(momentum)
        momentum.lerp_(gradient, 1 - self.options.momentum)
        return gradient.lerp(momentum, self.options.momentum).bfloat16()


def scale(shape: Sequence[int]) -> float:
    """What makes an orthogonal matrix as large as a step of AdamW (Liu et al. 2025, eq. 4)."""
    return 0.2 * sqrt(max(shape[-2:]))


def direction(whole: Tensor) -> Tensor:
    """About −U·Vᵀ of a bf16 matrix U·S·Vᵀ, or of each of `[experts, rows, columns]`: where torch.optim.Muon moves a
    zero at the learning rate that undoes its scale."""
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
    """Brings parts that the ranks of a group hold to the owners of the wholes, and back.

    Attributes:
        owned: what this rank has after `gather`, by number: the box around all ranks' parts.
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
            group: ranks among which matrices are divided; None = each has them whole.
            parts: what this rank holds, by numbers that are the same on every rank of the group.
            shapes: of the whole parameters.
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
        """What this rank owns, of the parts in `tensors` (which may hold others). Of equal parts only the first rank's
        is sent."""
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
        """This rank's parts, of what the owners have in `wholes`."""
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
        """What each rank sent here, piece by piece, of `sizes`."""
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
    """What each rank sends of its parts: nothing of one that a rank before it holds, too."""
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
    """A part's place in `whole`, which is what `box` is of the parameter."""
    if not part.numel:
        return whole.new_empty(part.shape)
    for dim, (start, size) in enumerate(zip(part.starts, part.shape, strict=True)):
        whole = whole.narrow(dim, start - box.starts[dim], size)
    return whole
