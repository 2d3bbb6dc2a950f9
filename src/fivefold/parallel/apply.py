"""A decoder laid out over ranks: the axes applied from the innermost outwards, then the weights made."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from fivefold.nn.decoder import Decoder
from fivefold.parallel.data import DataParallel, master_dtype
from fivefold.parallel.local import LocalParameter, initialize, local_parameters
from fivefold.spec.legal import Resolved
from fivefold.spec.parameters import parameters


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """The model as this rank runs it.

    Attributes:
        sequences: of the whole global batch, over which the auxiliary loss is a mean.
    """

    module: Decoder
    data: DataParallel
    parameters: list[LocalParameter]
    sequences: int


def parallelize(resolved: Resolved, device_mesh: DeviceMesh | None, device: torch.device) -> ParallelModel:
    """Builds the model of a config on this rank, with its initial weights.

    Nothing is allocated before the axes have divided it: a rank only ever holds its own part.

    Args:
        device_mesh: of `parallel.mesh.device_mesh`; None in one process without torch.distributed.
    """
    config = resolved.config
    with torch.device("meta"):
        decoder = Decoder(config.model, config.parallel.recompute).to(master_dtype(config.precision))
    data = DataParallel(decoder, device_mesh, resolved.mesh, config.parallel.zero, config.precision)
    decoder.to_empty(device=device)
    _retie(decoder)
    held = local_parameters(decoder, parameters(config.model))
    for parameter in held:
        initialize(parameter, config.run.seed)
    for buffer in decoder.buffers():  # selection biases, the same on every rank
        buffer.zero_()
    return ParallelModel(decoder, data, held, resolved.batch.global_batch)


def _retie(decoder: Decoder) -> None:
    """`to_empty` gives each module its own tensor: a tied head takes the embedding's again."""
    if decoder.model.tied:
        decoder.head.weight = decoder.embedding.weight
