"""Text from a decoder, token by token."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fivefold.nn.attention import Segments
from fivefold.nn.inputs import Inputs


@torch.no_grad()
def generate(
    logits_after: Callable[[Sequence[int]], Tensor],
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
        logits_after: the logits of the token that follows some tokens, `[vocabulary]`: see `next_logits`.
        context: tokens looked back at, at most.
        temperature: 0 takes the likeliest token.
        top_k: draw among this many likeliest tokens; 0 = all.
        end_of_text: a token that ends the text; None = never.

    Returns:
        The new tokens, without the prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, new = list(prompt), []
    for _ in range(count):
        logits = logits_after(tokens[-context:]).float().cpu()
        token = _draw(logits, temperature, top_k, generator)
        if token == end_of_text:
            break
        tokens.append(token)
        new.append(token)
    return new


def next_logits(decoder: nn.Module) -> Callable[[Sequence[int]], Tensor]:
    """What a decoder that is whole in this process expects after some tokens."""
    device = next(decoder.parameters()).device

    def after(tokens: Sequence[int]) -> Tensor:
        window = torch.tensor([list(tokens)], device=device)
        logits: Tensor = decoder(Inputs(window, Segments((len(tokens),))))
        return logits[0, -1]

    return after


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    values, indices = logits.topk(min(top_k or len(logits), len(logits)))
    chosen = torch.multinomial((values / temperature).softmax(dim=0), 1, generator=generator)
    return int(indices[chosen])
