"""What a run keeps for life: under another value of these keys its checkpoints would mean something else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fivefold.config.errors import BadInput
from fivefold.config.tree import Config
from fivefold.trainer import checkpoint_directory

SAMPLES = "samples"
# Of the model, what a trained one does not show.
FREE = ("preset", "max_positions", "init_std", "dropout")


def identity(config: Config, samples: str) -> dict[str, Any]:
    """What a checkpoint's tensors and counters rest on, by config key: the model, the state that its optimizer
    keeps, the type both are kept in, and what its sample counter counts (`samples`: `Mixture.digest`). JSON-able.
    """
    model = msgspec.to_builtins(config.model)
    kept = {f"model.{key}": value for key, value in model.items() if key not in FREE}
    return kept | {
        "optimizer.name": config.optimizer.name,
        "precision.dtype": "float64" if config.precision.dtype == "float64" else "float32, bf16 or fp16",
        "batch.sequence_length": config.batch.sequence_length,
        "run.seed": config.run.seed,
        SAMPLES: samples,
    }


def refuse_change(stored: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Path) -> None:
    """Raises BadInput if a run of identity `now` cannot go on from a `checkpoint` of identity `stored`."""
    key = next((key for key in stored if stored[key] != now.get(key)), None)
    if key is None:
        return
    if key == SAMPLES:
        raise BadInput(
            f"{checkpoint} was trained on other samples; set data.path or data.sources, "
            "data.tokenizer and data.validation_fraction back, or start a new run without --resume"
        )
    raise BadInput(
        f"{key} = {now.get(key)}: {checkpoint} was trained with {stored[key]}; set it back, or start a new run "
        "without --resume"
    )


def check_resume(config: Config, checkpoints: Path) -> None:
    """Refuses, before a rank starts, what `refuse_change` would of the newest checkpoint, but for its samples: to know
    those the text has to be read. A damaged checkpoint is left to who loads it.

    Raises:
        BadInput: in one line.
    """
    for newest in checkpoint_directory.complete(checkpoints)[-1:]:
        try:
            stored = json.loads((newest / checkpoint_directory.MANIFEST).read_bytes())["counters"]["identity"]
            now = identity(config, stored[SAMPLES])
        except (OSError, ValueError, KeyError, TypeError):
            return
        refuse_change(stored, now, newest)
