"""Which layers are on which pipeline stage: contiguous runs that minimise the cost of the most expensive stage.

The cost of a layer is the number of matmul parameters that a token passes through (its FLOPs are six times that). The
head costs vocab · hidden; the embedding costs nothing, since a look-up has no matmul. If the split is uneven, earlier
stages get fewer layers: they hold the embedding, and more micro-batches in flight.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from fivefold.config.errors import ConfigError
from fivefold.config.model import Model
from fivefold.config.tree import Parallel
from fivefold.spec.mesh import Mesh
from fivefold.spec.parameters import Parameter, parameters
from fivefold.spec.schedules import V_SHAPED


class Stage(NamedTuple):
    """What a pipeline stage computes: its layers, and whether it embeds tokens and computes the loss."""

    layers: range
    first: bool
    last: bool


def split_layers(
    costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[range, ...]:
    """Cuts layers 0 … len(costs)−1 into `stages` runs of at least one layer; the heaviest run is minimal.

    `first` and `last` are the costs that the first and last stage bear besides their layers. With up to two
    stages more than layers the last, and then the first, hold head and embedding alone.

    Raises:
        ConfigError: yet more stages.
    """
    layers = len(costs)
    if stages - layers in (1, 2):
        inner = tuple(range(layer, layer + 1) for layer in range(layers))
        return ((range(0),) if stages - layers == 2 else ()) + inner + (range(layers, layers),)
    if not 1 <= stages <= layers:
        raise ConfigError(
            f"parallel.pp × chunks = {stages} stages: the model's {layers} layers fill 1 to {layers}"
        )
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last
    cap = _smallest_cap(costs, extra)
    reach = _reach(costs, extra, cap)
    cuts = [layers]
    for stage in range(stages - 1, 0, -1):
        cuts.append(_start(costs, extra, cap, reach, stage, cuts[-1]))
    cuts.append(0)
    cuts.reverse()
    return tuple(range(start, end) for start, end in pairwise(cuts))


def _reach(costs: Sequence[float], extra: Sequence[float], cap: float) -> list[int]:
    """How many layers the first s + 1 stages can hold under `cap`, leaving one for each that follows."""
    found: list[int] = []
    layer = 0
    for stage, own in enumerate(extra):
        load, start = own, layer
        room = len(costs) - (len(extra) - 1 - stage)
        while layer < room and (layer == start or load + costs[layer] <= cap):
            load += costs[layer]
            layer += 1
        found.append(layer if load <= cap else -1)
        if load > cap:
            return [*found, *[-1] * (len(extra) - len(found))]
    return found


def _smallest_cap(costs: Sequence[float], extra: Sequence[float]) -> float:
    """The least load of a heaviest stage, by bisection; every candidate is some stage's load."""
    low, high = 0.0, sum(costs) + sum(extra)
    tolerance = 1e-9 * high
    while high - low > tolerance:
        middle = (low + high) / 2
        if _reach(costs, extra, middle)[-1] == len(costs):
            high = middle
        else:
            low = middle
    return high + tolerance


def _start(
    costs: Sequence[float],
    extra: Sequence[float],
    cap: float,
    reach: Sequence[int],
    stage: int,
    end: int,
) -> int:
    """First layer of `stage`, which ends before layer `end`: an even share of what is left, under the cap."""
    share = (sum(costs[:end]) + sum(extra[: stage + 1])) / (stage + 1)
    start, load = end - 1, extra[stage] + costs[end - 1]
    while start > stage and load + costs[start - 1] <= cap:
        must = start > reach[stage - 1]  # the stages before cannot hold so many
        if not must and load >= share * (1 - 1e-9):
            break
        start -= 1
        load += costs[start]
    return start


def even_split(layers: int, stages: int) -> tuple[range, ...]:
    """The split of frameworks that only count layers: equal runs, the remainder to the first stages; where
    embedding and head as two layers more make the runs equal, the ends hold one layer less (Megatron)."""
    if layers % stages and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        sizes = [each - (stage in (0, stages - 1)) for stage in range(stages)]
    else:
        sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    ends = list(accumulate(sizes))
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


@lru_cache(maxsize=64)
def layer_costs(model: Model) -> tuple[float, ...]:
    """Matmul parameters that one token meets in each layer."""
    costs = [0.0] * model.layers
    for parameter in parameters(model):
        if parameter.layer is not None:
            costs[parameter.layer] += _active(model, parameter)
    return tuple(costs)


def _active(model: Model, parameter: Parameter) -> float:
    if len(parameter.shape) == 3:
        return parameter.numel * model.experts.top_k / model.experts.count
    return float(parameter.numel) if len(parameter.shape) == 2 else 0.0


def most_stages(model: Model) -> int:
    """Stages a pipeline of the model can have: one a layer, and one each for embedding and head."""
    return model.layers + 2


def model_stages(model: Model, stages: int) -> tuple[range, ...]:
    """The layers of every stage; the embedding is on the first, the final norm and head on the last."""
    return split_layers(layer_costs(model), stages, last=float(model.vocab * model.hidden))


def pipeline_stages(model: Model, count: int) -> tuple[Stage, ...]:
    """The stages of a pipeline, in order."""
    split = model_stages(model, count)
    return tuple(Stage(layers, n == 0, n == count - 1) for n, layers in enumerate(split))


def is_tied_apart(model: Model, parallel: Parallel, mesh: Mesh) -> bool:
    """Whether a tied head is on another pipeline rank than the embedding, and so a copy of it."""
    return model.tied and mesh.pp > 1 and parallel.schedule not in V_SHAPED
