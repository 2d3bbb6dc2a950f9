"""What is trained: three small Llama-style decoders, and the rows of one step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """A decoder and its micro-batch.

    Attributes:
        experts: of `expert_ffn` columns each, two a token; 0 = a dense feed-forward of `ffn`.
    """

    hidden: int
    ffn: int
    vocab: int
    micro_batch: int
    experts: int = 0
    expert_ffn: int = 0
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    sequence: int = 512


SIZES = {
    "S1": Size(hidden=256, ffn=688, vocab=4096, micro_batch=4),
    "S2": Size(hidden=512, ffn=1376, vocab=8192, micro_batch=2),
    "MoE": Size(hidden=256, ffn=688, vocab=4096, micro_batch=4, experts=8, expert_ffn=344),
    "tiny": Size(hidden=64, ffn=128, vocab=256, micro_batch=2, layers=4, sequence=64),
}
COMPARED = ("S1", "S2", "MoE")
"""The sizes that bars are set for; "tiny" is to see whether everything starts."""
