"""Text from a decoder, token by token."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fivefold.nn.attention import Segments
from fivefold.nn.inputs import Inputs


@torch.no_grad()
def generate(
    decoder: nn.Module,
    prompt: Sequence[int],
    count: int,
    *,
    context: int,
    temperature: float,
    top_k: int,
    seed: int,
    end_of_text: int | None = None,
) -> list[int]:
    """Continues `prompt` by up to `count` tokens.

    Deterministic in `seed`, so the ranks of a divided model may run it together and draw the same tokens.

    Args:
        context: tokens looked back at, at most.
        temperature: 0 takes the likeliest token.
        top_k: draw among this many likeliest tokens; 0 = all.
        end_of_text: a token that ends the text; None = never.

    Returns:
        The new tokens, without the prompt.
    """
    device = next(decoder.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens, new = list(prompt), []
    for _ in range(count):
        window = torch.tensor([tokens[-context:]], device=device)
        logits = decoder(Inputs(window, Segments((window.shape[1],))))[0, -1].float().cpu()
        token = _draw(logits, temperature, top_k, generator)
        if token == end_of_text:
            break
        tokens.append(token)
        new.append(token)
    return new


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    values, indices = logits.topk(min(top_k or len(logits), len(logits)))
    chosen = torch.multinomial((values / temperature).softmax(dim=0), 1, generator=generator)
    return int(indices[chosen])
