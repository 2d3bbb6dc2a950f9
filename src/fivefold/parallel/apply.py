"""Where every parallelism is applied: `parallelize` builds this rank's part of a decoder, one axis after another.

Each axis has its file here (data.py, tensor.py, context.py, expert.py, pipeline.py) and a twin in ledger/ that predicts
its memory and traffic.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
from fivefold.parallel.tensor import PartialGradients, tensor_parallel
from fivefold.spec.legal import Resolved
from fivefold.spec.parameters import Parameter, parameters
from fivefold.spec.parts import copies, is_expert, part_of, shard_range, sharded_dim, tensor_copies
from fivefold.spec.stages import is_tied_apart


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """The model as this rank runs it.

    Attributes:
        parameters: the parts that this rank keeps and updates.
        partial: gradients of which each tensor-parallel rank computes a part.
        counts_tokens: True on one of the ranks that read the same tokens, so that sums over all ranks count them once.
        counts_results: True on one of the ranks that compute the same losses and routing counts, likewise.
        pipeline: the schedule over this rank's stages; None without pipeline parallel.
        tied_copy: the tied embedding, or the head that is a copy of it on another pipeline rank.
        unsent: by parameter name, what a run before this one had not sent of gradients and this one does not compress
            (`trainer.state.RegroupedCompression`): added to the gradients of the next step that is applied.
    """

    module: Decoder
    data: DataParallel
    parameters: list[LocalParameter]
    partial: PartialGradients
    counts_tokens: bool
    counts_results: bool
    pipeline: Pipeline | None = None
    tied_copy: TiedCopy | None = None
    unsent: dict[str, Tensor] = field(default_factory=dict)

    def reduce_gradients(self, scale: float = 1.0) -> None:
        """Sums gradients, which are `scale` times the true ones, over all ranks after the last backward of a step.
        Collective."""
        self.data.end_step()
        if self.tied_copy is not None:
            self.tied_copy.reduce()
        self.partial.sum()
        for parameter in self.parameters:
            if (left := self.unsent.get(parameter.spec.name)) is not None:
                gradient = parameter.value.grad
                parameter.value.grad = left * scale if gradient is None else gradient + left * scale

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Samples]) -> float:
        """The summed loss of this rank's micro-batches; under a pipeline 0 on all ranks but the last stage's."""
        if self.pipeline is None:
            losses = [self.module(batch.inputs) for batch in micro_batches]
        else:
            with self.data.gathered():
                losses = self.pipeline.forward(micro_batches)
        return float(sum(loss.item() for loss in losses))

    @torch.no_grad()
    def next_logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits of the token that follows `tokens`, `[vocabulary]`, on every rank. Collective."""
        if self.pipeline is None:
            return next_logits(self.module)(tokens)
        with self.data.gathered():
            return self.pipeline.next_logits(tokens, self.parameters[0].value.device)


def parallelize(resolved: Resolved, groups: Groups, rank: int, device: torch.device) -> ParallelModel:
    """Builds this rank's part of the model of a config, with its initial weights. Collective.

    The decoder starts on the meta device: memory is allocated for a rank's own part of each parameter only.
    """
    config, mesh, at = resolved.config, resolved.mesh, resolved.mesh.coordinates(rank)
    parallel = config.parallel
    stages = rank_stages(config.model, parallel.schedule, parallel.chunks, mesh.pp, at["pp"])
    with torch.device("meta"):
        decoder = Decoder(config.model, parallel.recompute, list(stages.values()))
    specs = {spec.name: spec for spec in parameters(config.model)}
    sharding = _Sharding(resolved, groups, rank, device)
    units = [sharding.unit(module, owners, specs) for module, owners in _parameters_by_unit(decoder)]
    if groups.cp is not None:
        context_parallel(decoder, groups.cp, parallel)
    if groups.ep is not None:
        expert_parallel(decoder, groups.ep)
    decoder.tie()
    if groups.tp is not None:
        tensor_parallel(decoder, groups.tp, parallel)
    data = DataParallel(units, parallel.zero, overlap=groups.pp is None)
    local = [sharding.local[name] for name in specs if name in sharding.local]
    for parameter in local:
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
        tied_copy = TiedCopy(sharding.local["embedding.weight"], groups.embedding, -(-per_tp // shards))
    return ParallelModel(
        decoder,
        data,
        local,
        PartialGradients(resolved, groups, local),
        counts_tokens=at["tp"] == at["pp"] == 0,
        counts_results=at["tp"] == 0,
        pipeline=pipeline,
        tied_copy=tied_copy,
    )


class _Sharding:
    """Replaces the parameters of modules by this rank's parts, as the layout table and ZeRO say.

    Attributes:
        local: the parts made so far, by parameter name.
    """

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
        self.local: dict[str, LocalParameter] = {}

    def unit(self, module: nn.Module, owners: dict[str, nn.Module], specs: dict[str, Parameter]) -> Unit:
        """The parameters of one unit; `owners`: parameter name → the module inside the unit that has it."""
        model = self._resolved.config.model
        chosen = [specs[name] for name in owners]
        experts = [spec for spec in chosen if is_expert(model, spec)]
        dense = [spec for spec in chosen if not is_expert(model, spec)]
        buckets = [
            self._bucket(some, division, owners)
            for some, division in ((dense, self._dense), (experts, self._expert))
            if some
        ]
        return Unit(module, buckets)

    def _bucket(self, specs: Sequence[Parameter], division: Division, owners: dict[str, nn.Module]) -> Bucket:
        config, mesh = self._resolved.config, self._resolved.mesh
        ep, zero = config.parallel.ep, config.parallel.zero
        parts = [part_of(config.model, spec, mesh, ep, self._rank) for spec in specs]
        bucket = Bucket([part.shape for part in parts], division, self._device)
        # Copies over tp must stay equal, but what compression makes of a parameter depends on the other parameters
        # in its bucket, which differ between tp ranks: so copies are summed uncompressed.
        copied = {spec.name for spec in specs if tensor_copies(config.model, spec, mesh.tp) > 1}
        momentum = 0.0 if division.replicate is None else corrected_momentum(config)
        if division.replicate is not None:
            made = compressor(compression_of(config.parallel), momentum, config.run.seed)
            sets, tp = ep if division is self._expert else 1, mesh.coordinates(self._rank)["tp"]
            place = tp * sets + mesh.expert_rank(self._rank, sets), mesh.tp * sets
            bucket.compress(made, [spec.name for spec in specs], copied, place)
        for spec, part, parameter, value in zip(specs, parts, bucket.parameters, bucket.values, strict=True):
            setattr(owners[spec.name], spec.name.rpartition(".")[2], parameter)
            dim = sharded_dim(part.shape, bucket.shards)
            own = part.narrow(dim, *shard_range(part.shape[dim], bucket.shards, bucket.index))
            number = copies(config.model, spec, mesh, ep, zero)
            if spec.name == "embedding.weight" and is_tied_apart(config.model, config.parallel, mesh):
                number *= 2
            shards = division.shard.group if division.shard else None
            momentum_corrected = momentum > 0 and spec.name not in copied
            self.local[spec.name] = LocalParameter(
                spec, own, value, number, shards, self._tensor, momentum_corrected
            )
        return bucket


def _parameters_by_unit(decoder: Decoder) -> list[tuple[nn.Module, dict[str, nn.Module]]]:
    """Units (the root, then each layer) in forward order, each with parameter name → the module that has it."""
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
