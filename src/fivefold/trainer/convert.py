"""Between Hugging Face model directories and runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from fivefold.config.errors import BadInput
from fivefold.config.huggingface import CONFIG_JSON, config_json, nearest_architecture, read_model
from fivefold.config.load import dump, load
from fivefold.config.tree import Batch, Checkpoint, Config, Data, Run
from fivefold.data.tokenizer import load_tokenizer
from fivefold.nn.hub.weights import open_weights, write_weights
from fivefold.spec.parameters import parameters
from fivefold.trainer.checkpoint import Checkpointer, load_tensors
from fivefold.trainer.directory import CHECKPOINTS, CONFIG, TOKENIZER, find_checkpoint

_SEQUENCE = 2048
"""Tokens of a sequence where a published model does not say what it is used with, at most."""


def convert(source: Path, target: Path) -> str:
    """Writes the Hugging Face directory of a run or of one of its checkpoints, or the run of such a directory.

    Returns:
        What was made, in a line.

    Raises:
        BadInput: nothing that can be converted, or `target` is there already.
    """
    if target.exists():
        raise BadInput(f"{target}: is there already; give a directory to be made")
    make = _to_run if (source / CONFIG_JSON).is_file() else _to_hugging_face
    return _whole_or_not_at_all(target, lambda partial: make(source, partial))


def _whole_or_not_at_all(target: Path, make: Callable[[Path], str]) -> str:
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        made = make(partial)
        partial.rename(target)
    except OSError as error:
        raise BadInput(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return made


def _to_hugging_face(source: Path, target: Path) -> str:
    directory, checkpoint = find_checkpoint(source)
    model = load(str(directory)).model
    theirs = config_json(model)
    if theirs is None:
        raise BadInput(
            f"{directory}: no Hugging Face architecture that is known here computes this model; "
            f"{nearest_architecture(model)}"
        )
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_tensors(checkpoint).items()}
    dtype = next(iter(tensors.values())).dtype
    theirs["torch_dtype"] = str(dtype).removeprefix("torch.")
    if (directory / TOKENIZER).is_file():
        tokenizer = load_tokenizer(directory / TOKENIZER, model.vocab)
        # A document begins after the end of another: what a model has learnt to begin with.
        theirs["bos_token_id"] = theirs["eos_token_id"] = tokenizer.end_of_text
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.max_positions}
        _write_json(
            target / "tokenizer_config.json", about | {"eos_token": tokenizer.decode([tokenizer.end_of_text])}
        )
        shutil.copyfile(directory / TOKENIZER, target / TOKENIZER)
    write_weights(target, theirs["model_type"], model, tensors)
    _write_json(target / CONFIG_JSON, theirs)
    return f"{theirs['architectures'][0]} with the weights of {checkpoint}"


def _to_run(source: Path, target: Path) -> str:
    weights = open_weights(source)
    model = read_model(source)
    weights.check(model)
    tokenizer = source / TOKENIZER
    config = Config(
        model=model,
        batch=Batch(sequence_length=min(model.max_positions, _SEQUENCE)),
        data=Data(tokenizer=str(tokenizer) if tokenizer.is_file() else ""),
        run=Run(name=source.resolve().name.lstrip(".")),
    )
    (target / CONFIG).write_text(dump(config), encoding="utf-8")
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, target / TOKENIZER)
    master = {spec: weights.read(spec) for spec in parameters(model)}
    state = {f"model.{spec.name}": _at_least_float32(tensor) for spec, tensor in master.items()}
    checkpoints = Checkpointer(target / CHECKPOINTS, Checkpoint())
    checkpoints.save(0, state, {}, dump(config), asynchronous=False)
    checkpoints.close()
    return f"run directory with the weights of {source} as step 0 (train on with model.path = {source})"


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
