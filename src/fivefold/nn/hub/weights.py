"""Weights in Hugging Face's files: safetensors, whole or in shards with an index."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fivefold.config.errors import BadInput
from fivefold.config.huggingface import read_config_json
from fivefold.config.model import Model
from fivefold.nn.hub.names import NO_PARAMETERS, TABLES, Place, places
from fivefold.spec.parameters import Parameter, parameters

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 << 30
"""Largest file written, as transformers has it; one larger tensor is a file of its own."""


@dataclass(frozen=True, slots=True)
class HubWeights:
    """A directory of published weights.

    Attributes:
        files: the opened file that holds a tensor.
        shapes: of the tensors, as stored.
    """

    directory: Path
    model_type: str
    files: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, parameter: Parameter, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows (of dim 0) `start` to `stop` of a parameter, in the file's dtype. Reads little more than them."""
        found = places(self.model_type, parameter)
        if len(found) > 1:
            return torch.stack([self._read(place) for place in found[start:stop]])
        if found[0].transposed or found[0].parts > 1:
            return self._read(found[0])[start:stop]
        return self._read(found[0], slice(start, stop))

    def check(self, model: Model) -> None:
        """Refuses files that lack a parameter of `model`, have another shape of it, or hold what it has not.

        Raises:
            BadInput: in one line.
        """
        expected = _stored_shapes(self.model_type, parameters(model))
        names = {self._name(name): shape for name, shape in expected.items()}
        held = {name for name in self.shapes if not name.endswith(NO_PARAMETERS)}
        if model.tied:
            held.discard("lm_head.weight")
        problems = [f"{name} is missing" for name in names if name not in self.shapes]
        problems += [
            f"{name} is {list(self.shapes[name])}, the model has {list(shape)}"
            for name, shape in names.items()
            if name in self.shapes and self.shapes[name] != shape
        ]
        problems += [f"{name} belongs to nothing in the model" for name in sorted(held - names.keys())]
        if problems:
            more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise BadInput(f"weights in {self.directory}: {problems[0]}{more}")

    def _name(self, name: str) -> str:
        """As the file has it: files of a model without its head leave out the first word."""
        short = name.partition(".")[2]
        return short if name not in self.files and short in self.files else name

    def _read(self, place: Place, rows: slice = slice(None)) -> Tensor:
        name = self._name(place.name)
        tensor: Tensor = self.files[name].get_slice(name)[rows]
        tensor = tensor.T if place.transposed else tensor
        return tensor.tensor_split(place.parts)[place.part]


def given_weights(model: Model) -> HubWeights | None:
    """The weights that training starts from; None where `model.path` is not a directory: it gave sizes only.

    Raises:
        BadInput: the directory has no weights of exactly this model.
    """
    directory = Path(model.path).expanduser()
    if not model.path or not directory.is_dir():
        return None
    weights = open_weights(directory)
    weights.check(model)
    return weights


def open_weights(directory: Path) -> HubWeights:
    """The weights in a Hugging Face model directory.

    Raises:
        BadInput: in one line: none there, not readable, or of a family whose weights have no table here.
    """
    model_type = read_config_json(directory)["model_type"]
    if model_type not in TABLES:
        raise BadInput(
            f'{directory}: no weights of a "{model_type}" are read here; known: {", ".join(TABLES)}'
        )
    files, shapes = dict[str, Any](), dict[str, tuple[int, ...]]()
    for file in _files(directory):
        try:
            opened: Any = safe_open(file, "pt")
        except (OSError, SafetensorError) as error:
            raise BadInput(f"{file}: not a readable safetensors file: {error}") from None
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            files[name], shapes[name] = opened, tuple(opened.get_slice(name).get_shape())
    return HubWeights(directory, model_type, files, shapes)


def write_weights(directory: Path, model_type: str, model: Model, ours: Mapping[str, Tensor]) -> None:
    """Writes all parameters of `model`, from tensors by our names, in files of at most `SHARD_BYTES`."""
    specs = parameters(model)
    sources: dict[str, list[Tensor]] = {}
    for spec in specs:
        found = places(model_type, spec)
        parts = ours[spec.name].unbind() if len(found) > 1 else [ours[spec.name]]
        for place, part in zip(found, parts, strict=True):
            sources.setdefault(place.name, []).append(part.T if place.transposed else part)
    transposed = {p.name for spec in specs for p in places(model_type, spec) if p.transposed}
    sizes = {name: sum(t.numel() * t.element_size() for t in parts) for name, parts in sources.items()}
    shards = list(_shards(sizes))
    files = [SINGLE] if len(shards) == 1 else [_shard_name(n, len(shards)) for n in range(len(shards))]
    for file, names in zip(files, shards, strict=True):
        # Fused outputs are rows of ours, and columns where the file is transposed.
        tensors = {name: torch.cat(sources[name], dim=int(name in transposed)).contiguous() for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
        placed = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": placed}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


def _shards(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names in order, cut so that each run's bytes fit one file."""
    names, size = list[str](), 0
    for name, numel in sizes.items():
        if names and size + numel > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += numel
    yield names


def _stored_shapes(model_type: str, specs: list[Parameter]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for spec in specs:
        held = places(model_type, spec)
        for place in held:
            shape = spec.shape[1:] if len(held) > 1 else spec.shape
            whole = (shape[0] * place.parts, *shape[1:])
            found[place.name] = whole[::-1] if place.transposed else whole
    return found


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        try:
            placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return [directory / name for name in sorted(set(placed.values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadInput(f"{index}: not an index of safetensors files: {error}") from None
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    raise BadInput(
        f"{directory}: no weights ({SINGLE} or {INDEX}); to train such a model from initial values, give "
        f"model.path = {directory / 'config.json'}"
    )
