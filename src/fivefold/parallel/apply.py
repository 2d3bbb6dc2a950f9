"""A decoder laid out over ranks: the axes applied from the innermost outwards, then the weights made."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fivefold.collectives.compression import compressor
from fivefold.ledger.compression import compression_of, corrected_momentum
from fivefold.nn.decoder import Decoder
from fivefold.nn.generate import next_logits
from fivefold.parallel.bucket import Bucket, Division
from fivefold.parallel.context import context_parallel
from fivefold.parallel.data import DataParallel, Unit, compute_dtype, master_dtype
from fivefold.parallel.expert import expert_parallel
from fivefold.parallel.local import LocalParameter, initialize
from fivefold.parallel.mesh import Groups
from fivefold.parallel.pipeline import Pipeline, Samples, TiedCopy, rank_stages
from fivefold.parallel.synchronise import Collectives
from fivefold.parallel.tensor import PartialGradients, apply_tensor_parallel
from fivefold.spec.legal import Resolved
from fivefold.spec.parameters import Parameter, parameters
from fivefold.spec.parts import copies, is_expert, part_of, shard_range, sharded_dim, tensor_copies
from fivefold.spec.stages import is_tied_apart


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """The model as this rank runs it.

    Attributes:
        parameters: what this rank keeps and updates.
        counts_tokens: whether this rank is the one, of all that read the same tokens, that counts them.
        counts_results: whether it is the one, of all that compute the same results, that adds them to sums over the
            run.
        pipeline: the stages of `module` and how a step runs them.
    """

    module: Decoder
    data: DataParallel
    parameters: list[LocalParameter]
    partial: PartialGradients
    counts_tokens: bool
    counts_results: bool
    pipeline: Pipeline | None = None
    tied_copy: TiedCopy | None = None

    def reduce_gradients(self) -> None:
        """After the last backward of a step: gradients become those of the whole global batch. Collective."""
        self.data.end_step()
        if self.tied_copy is not None:
            self.tied_copy.reduce()
        self.partial.sum()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Samples]) -> float:
        """The summed loss of this rank's micro-batches; under a pipeline, on the last stage's rank, else 0."""
        if self.pipeline is None:
            losses = [self.module(batch.inputs) for batch in micro_batches]
        else:
            with self.data.gathered():
                losses = self.pipeline.forward(micro_batches)
        return float(sum(loss.item() for loss in losses))

    @torch.no_grad()
    def next_logits(self, tokens: Sequence[int]) -> Tensor:
        """Of the token that follows `tokens`, `[vocabulary]`, on every rank. Collective."""
        if self.pipeline is None:
            return next_logits(self.module)(tokens)
        with self.data.gathered():
            return self.pipeline.next_logits(tokens, self.parameters[0].value.device)


def parallelize(resolved: Resolved, groups: Groups, rank: int, device: torch.device) -> ParallelModel:
    """Builds the model of a config on this rank, with its initial weights.

    Nothing is allocated before the axes have divided it: a rank only ever holds its own part.
    """
    config, mesh, at = resolved.config, resolved.mesh, resolved.mesh.coordinates(rank)
    parallel = config.parallel
    stages = rank_stages(config.model, parallel.schedule, parallel.chunks, mesh.pp, at["pp"])
    with torch.device("meta"):
        decoder = Decoder(config.model, parallel.recompute, list(stages.values()))
    specs = {spec.name: spec for spec in parameters(config.model)}
    split = _Split(resolved, groups, rank, device)
    units = [split.unit(module, owned, specs) for module, owned in _owned(decoder)]
    if groups.cp is not None:
        context_parallel(decoder, groups.cp, parallel)
    if groups.ep is not None:
        expert_parallel(decoder, groups.ep)
    decoder.tie()
    if groups.tp is not None:
        apply_tensor_parallel(decoder, groups.tp, parallel)
    data = DataParallel(units, parallel.zero, overlap=groups.pp is None)
    held = [split.held[name] for name in specs if name in split.held]
    for parameter in held:
        initialize(parameter, config.run.seed)
    _zero_buffers(decoder, master_dtype(config.precision), device)
    data.updated()
    if config.machine.compile:
        decoder.compile_layers()
    pipeline = tied_copy = None
    if groups.pp is not None:
        dtype = compute_dtype(config.precision)
        pipeline = Pipeline(parallel.schedule, decoder, stages, groups.pp, dtype)
    if groups.embedding is not None:
        shards = groups.shard.size() if groups.shard else 1
        per_tp = -(-config.model.vocab // mesh.tp)
        tied_copy = TiedCopy(split.held["embedding.weight"], groups.embedding, -(-per_tp // shards))
    return ParallelModel(
        decoder,
        data,
        held,
        PartialGradients(resolved, groups, held),
        counts_tokens=at["tp"] == at["pp"] == 0,
        counts_results=at["tp"] == 0,
        pipeline=pipeline,
        tied_copy=tied_copy,
    )


class _Split:
    """Gives modules the parameters that the layout table and ZeRO leave to this rank."""

    def __init__(self, resolved: Resolved, groups: Groups, rank: int, device: torch.device) -> None:
        self._resolved = resolved
        self._rank = rank
        self._device = device
        self._tensor = groups.tp
        config = resolved.config
        zero, types = config.parallel.zero, (compute_dtype(config.precision), master_dtype(config.precision))

        def over(group: ProcessGroup | None) -> Collectives | None:
            return Collectives(group, config.parallel.algorithm, groups.per_host) if group else None

        self._dense = Division(over(groups.shard), over(groups.replicate), zero, *types)
        self._expert = Division(over(groups.expert_shard), over(groups.expert_replicate), zero, *types)
        self.held: dict[str, LocalParameter] = {}

    def unit(self, module: nn.Module, owned: dict[str, nn.Module], specs: dict[str, Parameter]) -> Unit:
        """Replaces the parameters of `owned` (global name → the module that has it)."""
        model = self._resolved.config.model
        chosen = [specs[name] for name in owned]
        experts = [spec for spec in chosen if is_expert(model, spec)]
        dense = [spec for spec in chosen if not is_expert(model, spec)]
        buckets = [
            self._bucket(some, division, owned)
            for some, division in ((dense, self._dense), (experts, self._expert))
            if some
        ]
        return Unit(module, buckets)

    def _bucket(self, specs: Sequence[Parameter], division: Division, owned: dict[str, nn.Module]) -> Bucket:
        config, mesh = self._resolved.config, self._resolved.mesh
        ep, zero = config.parallel.ep, config.parallel.zero
        parts = [part_of(config.model, spec, mesh, ep, self._rank) for spec in specs]
        bucket = Bucket([part.shape for part in parts], division, self._device)
        if division.replicate is not None:
            made = compressor(compression_of(config.parallel), corrected_momentum(config), config.run.seed)
            # Copies over tp must stay equal, and compression treats a parameter by what is beside it in its bucket.
            copied = {spec.name for spec in specs if tensor_copies(config.model, spec, mesh.tp) > 1}
            sets, tp = ep if division is self._expert else 1, mesh.coordinates(self._rank)["tp"]
            place = tp * sets + mesh.expert_rank(self._rank, sets), mesh.tp * sets
            bucket.compress(made, [spec.name for spec in specs], copied, place)
        for spec, part, parameter, value in zip(specs, parts, bucket.parameters, bucket.values, strict=True):
            setattr(owned[spec.name], spec.name.rpartition(".")[2], parameter)
            dim = sharded_dim(part.shape, bucket.shards)
            own = part.narrow(dim, *shard_range(part.shape[dim], bucket.shards, bucket.index))
            number = copies(config.model, spec, mesh, ep, zero)
            if spec.name == "embedding.weight" and is_tied_apart(config.model, config.parallel, mesh):
                number *= 2
            shards = division.shard.group if division.shard else None
            self.held[spec.name] = LocalParameter(spec, own, value, number, shards, self._tensor)
        return bucket


def _owned(decoder: Decoder) -> list[tuple[nn.Module, dict[str, nn.Module]]]:
    """Units in forward order, the root first, each with its parameters' names and the modules that have them."""
    found: dict[nn.Module, dict[str, nn.Module]] = {decoder: {}}
    found |= {layer: {} for layer in decoder.layers.values()}
    for path, module in decoder.named_modules():
        layer = path.split(".")[1] if path.startswith("layers.") else None
        unit = decoder if layer is None else decoder.layers[layer]
        for name, _ in module.named_parameters(recurse=False):
            full = f"{path}.{name}"
            if decoder.model.tied and full == "head.weight":
                if decoder.is_tied:
                    continue
                full = "embedding.weight"
            found[unit][full] = module
    return list(found.items())


def _zero_buffers(decoder: Decoder, dtype: torch.dtype, device: torch.device) -> None:
    """Selection biases start at zero, the same on every rank."""
    for module in decoder.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, dtype=dtype, device=device))
