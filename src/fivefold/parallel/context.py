"""Context parallel: every rank holds some tokens of each sequence, attention sees them all.

Sequences that cp does not divide are cut unevenly (`spec.sequence`): nothing is padded but messages, to the
length of the fullest rank's.
"""

from fivefold.parallel.cut import Core, Cut
from fivefold.parallel.ring import Ring
from fivefold.parallel.ulysses import Ulysses


def context_core(cut: Cut, core: Core, recompute_attention: bool) -> Core:
    """The attention core over the ranks of a group, in place of `core` on whole sequences."""
    return Ulysses(cut, core) if cut.kind == "ulysses" else Ring(cut, recompute_attention)
