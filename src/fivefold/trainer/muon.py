"""Muon (Jordan et al. 2024) on divided matrices: each is orthogonalised whole, on one rank of those that hold it.

The step of a matrix is its momentum, orthogonalised by torch.optim.Muon and scaled to the size AdamW's steps have
(Liu et al. 2025), so that one learning rate serves both. Momentum stays where the parameter is; its matrices go to
their owners in one all-to-all, the steps come back in another. torch orthogonalises in bf16.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fivefold.config.tree import Optimizer
from fivefold.parallel.local import LocalParameter, Piece
from fivefold.spec.parameters import Parameter
from fivefold.spec.parts import Part

ROLES = ("attention", "ffn", "expert")
"""Of the matrices that Muon updates; embedding, head, router and everything that is no matrix go to AdamW."""


def is_matrix(parameter: Parameter) -> bool:
    """Whether Muon updates it: `[rows, columns]`, or `[experts, rows, columns]`."""
    return parameter.role in ROLES and len(parameter.shape) >= 2 and min(parameter.shape) > 1


class Muon:
    """Momentum and steps of the matrices among a rank's parameters."""

    def __init__(self, options: Optimizer, parameters: Sequence[LocalParameter]) -> None:
        self.options = options
        self.parameters = [parameter for parameter in parameters if is_matrix(parameter.spec)]
        self.momenta = [torch.zeros_like(parameter.value) for parameter in self.parameters]
        groups = dict.fromkeys(parameter.shards for parameter in self.parameters)
        self._exchanges = [
            Exchange(group, [(index, p) for index, p in enumerate(self.parameters) if p.shards is group])
            for group in groups
        ]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update with the gradients in the values' `grad`. Collective."""
        wanted = [self._momentum(*pair) for pair in zip(self.parameters, self.momenta, strict=True)]
        for exchange in self._exchanges:
            wholes = exchange.gather(wanted)
            steps = {index: _step(whole, learning_rate) for index, whole in wholes.items()}
            for index, step in exchange.scatter(steps, wanted).items():
                value, spec = self.parameters[index].value, self.parameters[index].spec
                decay = 0.0 if spec.role in self.options.no_decay else self.options.weight_decay
                value.mul_(1 - learning_rate * decay).add_(step)

    def state(self) -> dict[str, Piece]:
        """Momentum by global name, laid out like the parameters."""
        pairs = zip(self.parameters, self.momenta, strict=True)
        return {f"{p.spec.name}.momentum_buffer": p.piece(momentum) for p, momentum in pairs}

    def _momentum(self, parameter: LocalParameter, momentum: Tensor) -> Tensor:
        """Follows the gradient; returns what is to be orthogonalised (Nesterov's look ahead)."""
        gradient = parameter.value.grad
        if gradient is None:  # no token came by
            gradient = torch.zeros_like(momentum)
        momentum.lerp_(gradient, 1 - self.options.momentum)
        return gradient.lerp(momentum, self.options.momentum)


def _step(whole: Tensor, learning_rate: float) -> Tensor:
    """The step of a matrix, or of each of `[experts, rows, columns]`."""
    if whole.dim() == 3:
        return torch.stack([_step(matrix, learning_rate) for matrix in whole])
    moved = nn.Parameter(torch.zeros_like(whole))
    moved.grad = whole
    torch.optim.Muon(
        [moved],
        lr=learning_rate,
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    ).step()  # type: ignore[no-untyped-call]
    return moved.detach()


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Which of `ranks` has each of some matrices whole: the largest first, each to the rank that has least."""
    loads, found = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        found[index] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[found[index]] += sizes[index]
    return found


class Exchange:
    """Brings parts that the ranks of a group hold to the owners of the wholes, and back."""

    def __init__(self, group: ProcessGroup | None, numbered: Sequence[tuple[int, LocalParameter]]) -> None:
        """Collective.

        Args:
            group: ranks among which the parameters are divided; None = each has them whole.
            numbered: the parameters, each with its number in the lists handed to `gather` and `scatter`.
        """
        self._group = group
        self._shapes = {index: parameter.part.shape for index, parameter in numbered}
        self._indices = list(self._shapes)
        if group is None:
            return
        mine = [parameter.part for _, parameter in numbered]
        everyone: list[list[Part]] = [[]] * group.size()
        dist.all_gather_object(everyone, mine, group=group)
        self._parts = [dict(zip(self._indices, map(Part._make, parts), strict=True)) for parts in everyone]
        self._bounds = {index: _bounds([parts[index] for parts in self._parts]) for index in self._indices}
        sizes = [parameter.spec.numel for _, parameter in numbered]
        owner = dict(zip(self._indices, owners(sizes, group.size()), strict=True))
        self._owned = [[i for i in self._indices if owner[i] == rank] for rank in range(group.size())]

    def gather(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """The wholes this rank owns, by number, of parts by number."""
        if self._group is None:
            return {index: tensors[index] for index in self._indices}
        sent = [[tensors[index].flatten() for index in of_rank] for of_rank in self._owned]
        own = self._owned[self._group.rank()]
        received = self._exchange(
            sent, [[parts[index].numel for index in own] for parts in self._parts], tensors
        )
        wholes = {}
        for place, index in enumerate(own):
            low, high = self._bounds[index]
            whole = tensors[index].new_empty([b - a for a, b in zip(low, high, strict=True)])
            for parts, pieces in zip(self._parts, received, strict=True):
                _box(whole, parts[index], low).copy_(pieces[place].view(parts[index].shape))
            wholes[index] = whole
        return wholes

    def scatter(self, wholes: dict[int, Tensor], like: Sequence[Tensor]) -> dict[int, Tensor]:
        """This rank's parts, by number, of the wholes that the owners have."""
        if self._group is None:
            return wholes
        own = self._owned[self._group.rank()]
        sent = [
            [_box(wholes[index], parts[index], self._bounds[index][0]).flatten() for index in own]
            for parts in self._parts
        ]
        sizes = [[like[index].numel() for index in of_rank] for of_rank in self._owned]
        received = self._exchange(sent, sizes, like)
        return {
            index: piece.view(self._shapes[index])
            for of_rank, pieces in zip(self._owned, received, strict=True)
            for index, piece in zip(of_rank, pieces, strict=True)
        }

    def _exchange(
        self, sent: list[list[Tensor]], sizes: list[list[int]], like: Sequence[Tensor]
    ) -> list[list[Tensor]]:
        """What each rank sent here, piece by piece, of `sizes`."""
        empty = like[self._indices[0]].new_empty(0)
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


def _bounds(parts: Sequence[Part]) -> tuple[list[int], list[int]]:
    """The smallest box around all parts that hold something: first and one past the last along each dim."""
    held = [part for part in parts if part.numel]
    low = [min(starts) for starts in zip(*(part.starts for part in held), strict=True)]
    ends = ([s + n for s, n in zip(part.starts, part.shape, strict=True)] for part in held)
    return low, [max(end) for end in zip(*ends, strict=True)]


def _box(whole: Tensor, part: Part, low: Sequence[int]) -> Tensor:
    """A part's place in a whole that begins at `low`."""
    if not part.numel:
        return whole.new_empty(part.shape)
    for dim, (start, size) in enumerate(zip(part.starts, part.shape, strict=True)):
        whole = whole.narrow(dim, start - low[dim], size)
    return whole
