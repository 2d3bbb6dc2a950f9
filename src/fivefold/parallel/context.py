"""Context parallel: every rank holds some tokens of each sequence, attention sees them all.

Sequences that cp does not divide are cut unevenly (`spec.sequence`): nothing is padded but messages, to the
length of the fullest rank's. All else in a layer works token by token, but for the routers' auxiliary loss: it
is one of whole sequences, so how often each expert was chosen is summed over the ranks.
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
    """Has the attention of every layer see the tokens of all ranks of `group`."""

    def sum_choices(choices: Tensor) -> Tensor:
        dist.all_reduce(choices, group=group)
        return choices

    for module in decoder.modules():
        if isinstance(module, Attention):
            module.core = context_core(group, parallel, module.core)
        elif isinstance(module, Router):
            module.sum_choices = sum_choices


def context_core(group: ProcessGroup, parallel: Parallel, core: Core) -> Core:
    """An attention core over the ranks of a group, from `core` on whole sequences."""
    if parallel.context == "ulysses":
        return Ulysses(group, core)
    return Ring(group, core, parallel.recompute == "attention")
