"""Text from a finished run, in one process."""

from pathlib import Path

from fivefold.config.load import load
from fivefold.data.tokenizer import load_tokenizer
from fivefold.nn.decoder import Decoder
from fivefold.nn.generate import generate, next_logits
from fivefold.trainer.checkpoint import load_tensors
from fivefold.trainer.directory import TOKENIZER, find_checkpoint
from fivefold.trainer.machine import device


def write_text(run: Path, prompt: str, count: int, *, temperature: float, top_k: int, seed: int) -> str:
    """Continues `prompt` with the newest checkpoint of a run directory, or with one checkpoint in it.

    Raises:
        BadInput: no run, or no checkpoint in it.
    """
    directory, checkpoint = find_checkpoint(run)
    config = load(str(directory))
    tokenizer = load_tokenizer(directory / TOKENIZER, config.model.vocab)
    tensors = load_tensors(checkpoint)
    decoder = Decoder(config.model).to(next(iter(tensors.values())).dtype)
    names = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if config.model.tied:
        names["head.weight"] = names["embedding.weight"]
    decoder.load_state_dict(names)
    tokens = generate(
        next_logits(decoder.to(device())),
        tokenizer.encode([prompt])[0] or [tokenizer.end_of_text],
        count,
        context=config.batch.sequence_length,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        end_of_text=tokenizer.end_of_text,
    )
    return tokenizer.decode(tokens)
