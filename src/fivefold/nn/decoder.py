"""The decoder: embedding, layers, final norm, head and loss."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fivefold.config.model import Model
from fivefold.nn.attention import Attention, Segments
from fivefold.nn.chain import Chain, compile_chains
from fivefold.nn.dropout import drop, site_keys, site_number, token_keys
from fivefold.nn.experts import Experts
from fivefold.nn.feed_forward import make_feed_forward
from fivefold.nn.inputs import Inputs
from fivefold.nn.loss import add_auxiliary_gradient, attach_auxiliary, cross_entropy_sum
from fivefold.nn.norm import make_norm
from fivefold.nn.recompute import Recompute
from fivefold.nn.region import WHOLE, Region
from fivefold.nn.rotary import Rotary, rotary_table
from fivefold.nn.router import Routing, balanced
from fivefold.nn.vocabulary import Embedding, VocabularyShard, head_logits
from fivefold.spec.stages import Stage


class DecoderLayer(nn.Module):
    """Attention and feed-forward (dense, or of experts), each behind a norm and added to the residual stream."""

    def __init__(self, model: Model, index: int, recompute: Recompute) -> None:
        super().__init__()
        self.index, self.dropout = index, model.dropout
        self.attention_norm = make_norm(model)
        self.attention = Attention(model, recompute)
        self.feed_forward_norm = make_norm(model)
        if model.experts.count and index >= model.experts.dense_layers:
            self.experts = Experts(model)
        else:
            self.feed_forward = make_feed_forward(model, model.ffn)
        self.normed = Chain(self._normed)
        self.added_and_normed = Chain(self._added_and_normed)
        self.added = Chain(self._added)
        self.run = recompute.layer(self._run)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None,
        segments: Segments,
        region: Region = WHOLE,
        keys: Tensor | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """`x` and the first result: the residual stream, `[batch, sequence, hidden]` or as `region` holds it;
        the second only if it routes.

        Args:
            keys: `dropout.token_keys` of the stream's tokens; None = no dropout.
        """
        sites = [
            None if keys is None else site_keys(keys, site_number(self.index, branch)) for branch in (0, 1)
        ]
        return self.run(x, rotary, segments, region, *sites)

    def _run(
        self,
        x: Tensor,
        rotary: Rotary | None,
        segments: Segments,
        region: Region,
        attention_keys: Tensor | None,
        feed_forward_keys: Tensor | None,
    ) -> tuple[Tensor, Routing | None]:
        branch = region.leave(self.attention(region.enter(self.normed(x)), rotary, segments))
        x, inner = self.added_and_normed(x, branch, attention_keys)
        inner, routing = region.enter(inner), None
        if hasattr(self, "experts"):
            inner, routing = self.experts(inner)
        else:
            inner = self.feed_forward(inner)
        return self.added(x, region.leave(inner), feed_forward_keys), routing

    def _normed(self, x: Tensor) -> Tensor:
        return self.attention_norm(x)  # type: ignore[no-any-return]

    def _added(self, x: Tensor, branch: Tensor, keys: Tensor | None) -> Tensor:
        return x + drop(branch, keys, self.dropout)

    def _added_and_normed(self, x: Tensor, branch: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self._added(x, branch, keys)
        return x, self.feed_forward_norm(x)


class Decoder(nn.Module):
    """The decoder that `model` describes, or the stages of it that one pipeline rank has.

    Layers are keyed by their number in the whole model, so parameters have the same names on every rank. A tied head on
    another rank than its embedding is a copy, `head.weight`.

    Attributes:
        stages: the pipeline stages of this rank; without a pipeline one stage, the whole model.
        region_of: returns the region of a layer for micro-batches of shape `(batch, sequence)`; see `nn.region`.
        head_shard: the vocabulary rows of the head on this rank; None = all.
        region_ranks: the number of tensor-parallel ranks, each of which computes a part of every region.
    """

    def __init__(
        self,
        model: Model,
        recompute: Literal["none", "attention", "elementwise", "full"] = "none",
        stages: Sequence[Stage] | None = None,
    ) -> None:
        """`stages`: the stages of this rank; None = the whole model as one stage."""
        super().__init__()
        self.model = model
        self.recompute = recompute
        self.stages = tuple(stages) if stages else (Stage(range(model.layers), first=True, last=True),)
        self.region_of: Callable[[tuple[int, int]], Region] = lambda _: WHOLE
        self.head_shard: VocabularyShard | None = None
        self.region_ranks = 1
        if any(stage.first for stage in self.stages):
            self.embedding = Embedding(model.vocab, model.hidden)
            if model.positions == "learned":
                self.positions = nn.Embedding(model.max_positions, model.hidden)
            if model.embedding_norm:
                self.embedding_norm = make_norm(model)
        self.recomputing = modes = Recompute(recompute)
        self.layers = nn.ModuleDict(
            {str(index): DecoderLayer(model, index, modes) for stage in self.stages for index in stage.layers}
        )
        if any(stage.last for stage in self.stages):
            self.norm = make_norm(model)
            self.normed = Chain(self._normed)
            self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        self._counts: Tensor | None = None
        self.tie()

    @property
    def is_tied(self) -> bool:
        """Whether the head is tied to an embedding on the same rank."""
        return self.model.tied and hasattr(self, "embedding") and hasattr(self, "head")

    def tie(self) -> None:
        """Ties the head's weight to the embedding's, if both are on this rank."""
        if self.is_tied:
            self.head.weight = self.embedding.weight

    def stage_parameters(self, stage: Stage) -> list[nn.Parameter]:
        """The parameters of `stage`."""
        names = [f"layers.{index}" for index in stage.layers]
        names += ["embedding", "positions", "embedding_norm"] if stage.first else []
        names += ["norm", "head"] if stage.last else []
        modules = dict(self.named_modules())
        return [parameter for name in names if name in modules for parameter in modules[name].parameters()]

    def stream_shape(self, tokens: Tensor) -> tuple[int, ...]:
        """The shape of the hidden states that stages send to each other for a micro-batch of `tokens`."""
        shape = tokens.shape[0], tokens.shape[1]
        return self.region_of(shape).stream_shape(shape, self.model.hidden)

    def forward(
        self,
        inputs: Inputs,
        tokens_per_sequence: float = 0.0,
        *,
        stage: Stage | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        """The summed loss over counted labels, or the logits if there are no labels; for a stage that is not the last,
        the residual stream after its layers.

        The routers' auxiliary loss contributes to the gradient but not to the value. It is a mean over the sequences of
        the global batch, whereas the returned loss is a sum to be divided by the counted tokens of the global batch: so
        its weight is `tokens_per_sequence`.

        Args:
            tokens_per_sequence: counted tokens per sequence of the global batch; on a stage that is not the last, times
                the factor by which the loss is scaled before backward.
            stage: the stage to compute, one of `stages`; None = the only one.
            stream: the result of the previous stage; None for the first.

        Returns:
            A scalar, or logits `[batch, sequence, vocabulary]`, or `[batch, sequence, hidden]`.
        """
        tokens, labels, positions = inputs.tokens, inputs.labels, inputs.row_positions()
        stage = stage or self.stages[0]
        region = self.region_of((tokens.shape[0], tokens.shape[1]))
        keys = None
        if self.model.dropout and inputs.dropout_key is not None:
            keys = region.own(token_keys(inputs.dropout_key, inputs.row_numbers(), positions))
        if stream is None:
            x = self._embedded(tokens, positions, region)
            x = drop(x, None if keys is None else site_keys(keys, 0), self.model.dropout)
        else:
            x = stream
        rotary = rotary_table(self.model, positions) if self.model.positions == "rotary" else None
        routings: dict[str, Routing] = {}
        for index in map(str, stage.layers):
            x, routing = self.layers[index](x, rotary, inputs.segments, region, keys)
            if routing is not None:
                routings[index] = routing
        if labels is not None and torch.is_grad_enabled() and self.model.experts.count:
            self._count(routings, tokens.device)
        auxiliary = self._auxiliary(routings, tokens_per_sequence)
        if not stage.last:
            return x if auxiliary is None else attach_auxiliary(x, auxiliary)
        x = region.enter(self.normed(x))
        if labels is None:
            return head_logits(x, self.head.weight, self.head_shard)
        loss = cross_entropy_sum(x.flatten(0, 1), self.head.weight, labels.flatten(), self.head_shard)
        return loss if auxiliary is None else add_auxiliary_gradient(loss, auxiliary)

    def compile_layers(self) -> None:
        """Compiles the chains of the layers, and the final norm (see `nn.chain`)."""
        compile_chains(self)

    def take_counts(self) -> list[float]:
        """The number of times each expert of each layer was chosen since the last call, layer by layer.

        0 for layers without experts or of other stages; empty for a model without experts. Forwards without gradients,
        and recomputed ones, are not counted.
        """
        counts, self._counts = self._counts, None
        if counts is None:
            return [0.0] * (self.model.layers * self.model.experts.count)
        return counts.flatten().double().tolist()

    @torch.no_grad()
    def balance(self, counts: list[float]) -> None:
        """Updates the routers' selection biases from the counts of the whole global batch."""
        if not counts:
            return
        table = torch.tensor(counts, dtype=torch.float64).view(self.model.layers, -1)
        for index, layer in self.layers.items():
            if (bias := getattr(getattr(layer, "experts", None), "selection_bias", None)) is not None:
                chosen = table[int(index)].to(bias.device)
                bias.copy_(balanced(bias, chosen, self.model.experts.bias_update_rate))

    def _auxiliary(self, routings: dict[str, Routing], tokens_per_sequence: float) -> Tensor | None:
        # Every tensor-parallel rank computes the whole auxiliary loss, and gradients are summed over these ranks.
        weight = self.model.experts.auxiliary_loss * tokens_per_sequence / self.region_ranks
        if not weight or not routings:
            return None
        return weight * torch.stack([routing.imbalance for routing in routings.values()]).sum()

    def _count(self, routings: dict[str, Routing], device: torch.device) -> None:
        if self._counts is None:
            size = (self.model.layers, self.model.experts.count)
            self._counts = torch.zeros(size, dtype=torch.int64, device=device)
        for index, routing in routings.items():
            self._counts[int(index)] += routing.counts

    def _normed(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]

    def _embedded(self, tokens: Tensor, positions: Tensor, region: Region) -> Tensor:
        """`[batch, sequence]` → the residual stream; learned positions are those in the packed row."""
        x = region.leave(self.embedding(tokens))
        if self.model.positions == "learned":
            x = x + self.positions(region.own(positions))
        if self.model.embedding_norm:
            x = self.embedding_norm(x)
        return x
