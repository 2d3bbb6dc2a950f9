"""The identity of a run: config keys that a resumed run must not change, because its checkpoints depend on them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fivefold.config.errors import BadInput
from fivefold.config.tree import Config
from fivefold.data.source import sources, whole_weights
from fivefold.trainer import checkpoint_directory

SAMPLES = "samples"
# Keys of [model] that a trained model does not depend on.
FREE = ("preset", "init_std", "dropout")


def identity(config: Config, samples: str) -> dict[str, Any]:
    """The values that a checkpoint's tensors and counters depend on, by config key: the model, what the optimizer keeps
    and its dtype, and the samples that its counter counts (`samples`: `Mixture.digest`). JSON-able.
    """
    model = msgspec.to_builtins(config.model)
    free = FREE if config.model.positions == "learned" else (*FREE, "max_positions")
    kept = {f"model.{key}": value for key, value in model.items() if key not in free}
    kept["optimizer.name"] = config.optimizer.name
    if config.optimizer.name == "sgd":
        kept["optimizer.momentum"] = "above 0" if config.optimizer.momentum else "0"
    weights = whole_weights([source.weight for source in sources(config.data)])
    return kept | {
        "data.sources": "one source" if len(weights) == 1 else f"weights {', '.join(map(str, weights))}",
        "precision.dtype": "float64" if config.precision.dtype == "float64" else "float32, bf16 or fp16",
        "batch.sequence_length": config.batch.sequence_length,
        "run.seed": config.run.seed,
        SAMPLES: samples,
    }


def refuse_change(stored: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Path) -> None:
    """Raises BadInput if a run of identity `now` cannot continue from a `checkpoint` of identity `stored`. Weights
    written by `fivefold convert` have no identity."""
    if not stored:
        raise BadInput(
            f"{checkpoint} holds weights alone, no run to go on with; train from the Hugging Face directory they came "
            "from (fivefold train CONFIG --set model.path=DIR)"
        )
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


def check_resume(config: Config, checkpoints: Path, digest: Callable[[], str | None]) -> None:
    """Applies `refuse_change` to the newest checkpoint before a rank starts. A damaged checkpoint is reported when it
    is loaded.

    Args:
        digest: computes `Mixture.digest` of the run; None where the data are not prepared yet. Not called where
            something else is refused.

    Raises:
        BadInput: in one line.
    """
    for newest in checkpoint_directory.complete(checkpoints)[-1:]:
        try:
            manifest = json.loads((newest / checkpoint_directory.MANIFEST).read_bytes())
            stored = manifest["counters"].get("identity", {})
            now = identity(config, stored[SAMPLES] if stored else "")
        except (OSError, ValueError, KeyError, TypeError):
            return
        refuse_change(stored, now, newest)
        samples = digest()
        if samples is not None:
            refuse_change(stored, now | {SAMPLES: samples}, newest)
