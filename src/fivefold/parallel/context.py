"""Context parallel: each rank holds some tokens of every sequence, and attention sees all of them (ring.py,
ulysses.py).

Sequences that cp does not divide are split unevenly (`spec.sequence`): only messages are padded, to the length of the
rank with the most tokens. Everything else in a layer works token by token, except for the routers' auxiliary loss,
which is defined on whole sequences: the counts of each expert's choices are summed over the ranks. Twin:
ledger/context.py.
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fivefold.config.tree import Parallel
from fivefold.nn.attention import Attention, Core
from fivefold.nn.decoder import Decoder
from fivefold.nn.router import Router
from fivefold.parallel.ring import Ring
from fivefold.parallel.ulysses import Ulysses


def context_parallel(decoder: Decoder, group: ProcessGroup, parallel: Parallel) -> None:
    """Makes every layer's attention, and its router's counts, run over the tokens of all ranks of `group`."""

    def sum_choices(choices: Tensor) -> Tensor:
        dist.all_reduce(choices, group=group)
        return choices

    for module in decoder.modules():
        if isinstance(module, Attention):
            module.core = context_core(group, parallel, module.core)
        elif isinstance(module, Router):
            module.sum_choices = sum_choices


def context_core(group: ProcessGroup, parallel: Parallel, core: Core) -> Core:
    """The attention core over the ranks of a group; `core` is the one for whole sequences."""
    if parallel.context == "ulysses":
        return Ulysses(group, core)
    return Ring(group, core, parallel.recompute == "attention")
