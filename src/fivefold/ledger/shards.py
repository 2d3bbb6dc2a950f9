"""Parameters that one rank holds of each part of the model, by the layout table, before any ZeRO split."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from fivefold.config.model import Model
from fivefold.ledger.compression import UNCOMPRESSED, Compression, kept_elements
from fivefold.ledger.job import Job
from fivefold.spec.layout import Owned, Split, placements
from fivefold.spec.legal import units
from fivefold.spec.matrices import is_matrix
from fivefold.spec.parameters import Parameter, parameters
from fivefold.spec.parts import tensor_copies
from fivefold.spec.stages import even_split, model_stages


class Share(NamedTuple):
    """Parameters of one rank: those every data-parallel rank holds, and experts (over dp · cp / ep); of both, those
    in matrices that Muon would update; and what compression keeps of their gradients."""

    dense: int
    expert: int
    matrices: int = 0
    expert_matrices: int = 0
    kept: int = 0
    expert_kept: int = 0

    def __add__(self, other: object) -> "Share":
        assert isinstance(other, Share)
        return Share(
            self.dense + other.dense,
            self.expert + other.expert,
            self.matrices + other.matrices,
            self.expert_matrices + other.expert_matrices,
            self.kept + other.kept,
            self.expert_kept + other.expert_kept,
        )

    @property
    def total(self) -> int:
        return self.dense + self.expert


class Parts(NamedTuple):
    """One rank's share of each part of the model."""

    embedding: Share
    dense_layer: Share
    expert_layer: Share
    head: Share
    norm: Share


@lru_cache(maxsize=4096)
def parts(
    model: Model, tp: int, ep: int, expert_tp: int, pad: int = 1, how: Compression = UNCOMPRESSED
) -> Parts:
    """Shares by the layout table; a tied head's copy on the last stage is the embedding's size. The rows of
    every dense parameter are filled up to a multiple of `pad`, as it takes to split them over `pad` ranks."""
    embedding = dense = expert = head = norm = Share(0, 0)
    for parameter in representatives(model):
        share = _share(model, parameter, tp, ep, expert_tp, pad, how)
        if parameter.layer is None:
            if parameter.role == "head":
                head += share
            elif parameter.name.startswith("norm."):
                norm += share
            else:
                embedding += share
        elif model.experts.count and parameter.layer >= model.experts.dense_layers:
            expert += share
        else:
            dense += share
    if model.tied:
        rows = -(-model.vocab // tp)
        head = Share(-(-rows // pad) * pad * model.hidden, 0)
    return Parts(embedding, dense, expert, head, norm)


@lru_cache(maxsize=64)
def representatives(model: Model) -> tuple[Parameter, ...]:
    """Everything outside the layers, and one layer of each kind."""
    layers = {0, model.layers - 1} if 0 < model.experts.dense_layers < model.layers else {0}
    return tuple(p for p in parameters(model) if p.trained and (p.layer is None or p.layer in layers))


def _share(
    model: Model, parameter: Parameter, tp: int, ep: int, expert_tp: int, pad: int, how: Compression
) -> Share:
    axes = placements(model, parameter.name)
    shape = list(parameter.shape)
    expert = isinstance(axes.get("ep"), Owned)
    is_copy = tensor_copies(model, parameter, expert_tp if expert else tp) > 1
    if expert:
        shape[0] //= ep
    split = axes.get("tp")
    if isinstance(split, Split):
        degree = expert_tp if expert else tp
        if split.replicable:
            degree = min(degree, units(model, split.unit))
        shape[split.dim] = -(-shape[split.dim] // degree)
    if not expert:
        shape[0] = -(-shape[0] // pad) * pad
    numel = 1
    for size in shape:
        numel *= size
    in_matrix = numel if is_matrix(parameter) else 0
    kept = kept_elements(how, shape, is_copy=is_copy)
    return Share(0, numel, 0, in_matrix, 0, kept) if expert else Share(numel, 0, in_matrix, 0, kept)


class StageContent(NamedTuple):
    """What a stage holds."""

    dense_layers: int
    expert_layers: int
    first: bool
    last: bool


def together(stages: Iterable[StageContent]) -> StageContent:
    """What a rank with these stages holds."""
    dense, expert, first, last = zip(*stages, strict=True)
    return StageContent(sum(dense), sum(expert), any(first), any(last))


@lru_cache(maxsize=4096)
def contents(model: Model, stages: int, even: bool = False) -> tuple[StageContent, ...]:
    """What each stage holds: by the balanced split, or by counting layers only."""
    boundary = model.experts.dense_layers if model.experts.count else model.layers
    found = []
    for stage, layers in enumerate(even_split(model.layers, stages) if even else model_stages(model, stages)):
        dense = max(0, min(layers.stop, boundary) - layers.start)
        found.append(StageContent(dense, len(layers) - dense, stage == 0, stage == stages - 1))
    return tuple(found)


def layers_share(job: Job, content: StageContent, pad: int = 1) -> Share:
    """One rank's parameters of a stage's layers."""
    part = parts(job.model, job.tp, job.ep, job.expert_width_split, pad, job.stack.compression)
    dense, expert = content.dense_layers, content.expert_layers
    return Share(
        dense * part.dense_layer.dense + expert * part.expert_layer.dense,
        expert * part.expert_layer.expert,
        dense * part.dense_layer.matrices + expert * part.expert_layer.matrices,
        expert * part.expert_layer.expert_matrices,
        dense * part.dense_layer.kept + expert * part.expert_layer.kept,
        expert * part.expert_layer.expert_kept,
    )


def stage_share(job: Job, content: StageContent, pad: int = 1) -> Share:
    """One rank's parameters of a stage. A tied head on the embedding's own stage is no second copy."""
    part = parts(job.model, job.tp, job.ep, job.expert_width_split, pad, job.stack.compression)
    share = layers_share(job, content, pad)
    if content.first and job.head_split == 1:
        share += part.embedding
    if content.last:
        share += part.norm
        if not (job.model.tied and content.first) and job.head_split == 1:
            share += part.head
    if job.head_split > 1:
        share += Share((part.embedding.dense + part.head.dense) // job.stages, 0)
    return share
