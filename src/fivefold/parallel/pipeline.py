"""Pipeline parallel: the stages of one rank, and a schedule's step over them. Twin of ledger/pipeline.py.

Schedules are the action lists of torch.distributed.pipelining (`spec/schedules.py`; a test holds them to torch's
own), a backward is split into input and weight gradients by torch's functions. The loop that runs the lists is ours:
torch's keeps a receive buffer for every micro-batch and both directions, and all that was sent until the step ends,
so that no schedule would hold the number of micro-batches in flight that it is chosen for.

Every rank of a pipeline reads the same samples, so only hidden states and their gradients cross between stages.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fivefold.collectives.record import Recorder
from fivefold.config.model import Model
from fivefold.nn.attention import Segments
from fivefold.nn.decoder import Decoder
from fivefold.nn.inputs import Inputs
from fivefold.parallel.local import LocalParameter
from fivefold.spec import schedules
from fivefold.spec.messages import Message, Need, Plan, plans, receives_first
from fivefold.spec.schedules import Action, Kind
from fivefold.spec.stages import Stage, pipeline_stages


class Samples(Protocol):
    """A micro-batch."""

    @property
    def inputs(self) -> Inputs: ...


class _Prompt(NamedTuple):
    """One row to continue."""

    inputs: Inputs


class TiedCopy(NamedTuple):
    """A tied embedding, or the head that is its copy on another rank.

    Attributes:
        group: the ranks of the two.
        rows: that a rank keeps at most, the same on all ranks: fewer are filled up, so that all send alike.
    """

    parameter: LocalParameter
    group: dist.ProcessGroup
    rows: int

    def reduce(self) -> None:
        """Each copy's gradient becomes the sum of both, in the same bits: so the copies stay equal."""
        gradient = self.parameter.gradient()
        assert gradient is not None
        lacking = self.rows - gradient.shape[0]
        both = torch.nn.functional.pad(gradient, (0, 0, 0, lacking)) if lacking else gradient
        dist.all_reduce(both, group=self.group)
        if lacking:
            gradient.copy_(both[: gradient.shape[0]])


@dataclass(slots=True)
class _InFlight:
    """A micro-batch on a stage between its forward and the end of its backward.

    Attributes:
        input: a leaf; None on the first stage.
        output: the loss, ready for backward, on the last stage. Where backward is not split only its place in the
            graph is kept: the values are of no more use.
        gradient: of the output; None for the loss.
        parts: of the graph, between input and weight gradients (see torch's `stage_backward_input`).
    """

    input: Tensor | None
    output: Tensor | GradientEdge
    gradient: Tensor | None = None
    parts: list[dict[str, Any]] | None = None


def rank_stages(model: Model, name: schedules.Name, chunks: int, ranks: int, rank: int) -> dict[int, Stage]:
    """The stages of a pipeline rank, by their number in the pipeline."""
    all_stages = pipeline_stages(model, ranks * schedules.chunks_of(name, chunks))
    return {number: all_stages[number] for number in schedules.stages_of_rank(name, rank, ranks, chunks)}


class Pipeline:
    """One rank's stages and what it does with them in a step.

    Args:
        name: of the schedule.
        decoder: has the stages.
        stages: by their number in the pipeline.
        group: the ranks of the pipeline, in its order.
        dtype: of what passes between stages.
    """

    def __init__(
        self,
        name: schedules.Name,
        decoder: Decoder,
        stages: Mapping[int, Stage],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        self.decoder, self.stages, self.group, self.dtype = decoder, dict(stages), group, dtype
        # Where layers are recomputed in backward each half of a split one would recompute them (and torch's selective
        # checkpoint refuses): a stage's whole backward is then done when its input gradient is due.
        self.splits = name in schedules.SPLITS_BACKWARD and decoder.recompute in ("none", "attention")
        self.rank, ranks, chunks = group.rank(), group.size(), len(stages)
        self.weights = {number: decoder.stage_parameters(stage) for number, stage in self.stages.items()}
        self._name = name
        self._place = [schedules.rank_of_stage(name, stage, ranks) for stage in range(ranks * chunks)]
        self._plans: dict[int, Plan] = {}  # by number of micro-batches

    def step(
        self, micro_batches: Sequence[Samples], tokens_per_sequence: float, factor: float, recorder: Recorder
    ) -> float:
        """Adds the gradients of a step's micro-batches to the parameters' `grad`.

        Args:
            micro_batches: a number that the schedule exists for.
            tokens_per_sequence: see `Decoder.forward`.
            factor: on the summed loss, before backward.

        Returns:
            The summed loss of the micro-batches, on the rank of the last stage; 0 on the others.
        """
        run = _Run(self, micro_batches, tokens_per_sequence, factor)
        for entry in self._plan(len(micro_batches)):
            if isinstance(entry, Message):
                with recorder.phase("forward" if entry.need.forward else "backward"):
                    run.mail.pass_on(entry)
            elif entry.kind is Kind.FORWARD:
                with recorder.phase("forward"):
                    run.forward(entry)
            else:
                with recorder.phase("backward"):
                    run.backward(entry)
        run.mail.finish()
        return sum(run.losses[number].item() for number in sorted(run.losses))

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[Samples]) -> list[Tensor]:
        """What the last stage returns for each micro-batch (of any number), on its rank; nothing on the others.

        Each stage takes all micro-batches before the rank's next: nothing is kept but what passes on.
        """
        ranks, count = self.group.size(), len(micro_batches)
        own = [[stage for stage, rank in enumerate(self._place) if rank == other] for other in range(ranks)]
        work = [[Action(Kind.FORWARD, s, m) for s in stages for m in range(count)] for stages in own]
        mail, found = _Transfers(self, micro_batches), []
        for entry in self._ordered(plans(work, self._place)[self.rank]):
            if isinstance(entry, Message):
                mail.pass_on(entry)
                continue
            _, number, index, _ = entry
            batch, stage = micro_batches[index], self.stages[number]
            stream = None if stage.first else mail.take(Need(True, number, index))
            out = self.decoder(batch.inputs, stage=stage, stream=stream)
            if stage.last:
                found.append(out)
            else:
                mail.give(Need(True, number + 1, index), out)
        mail.finish()
        return found

    def _plan(self, micro_batches: int) -> Plan:
        if micro_batches not in self._plans:
            work = schedules.actions(self._name, self.group.size(), micro_batches, len(self.stages))
            self._plans[micro_batches] = self._ordered(plans(work, self._place)[self.rank])
        return self._plans[micro_batches]

    def _ordered(self, plan: Plan) -> Plan:
        on_cpu = next(self.decoder.parameters()).device.type == "cpu"
        return receives_first(plan, self.rank) if on_cpu else plan

    def next_logits(self, tokens: Sequence[int], device: torch.device) -> Tensor:
        """Of the token that follows `tokens`, `[vocabulary]`, on every rank."""
        window = torch.tensor([list(tokens)], device=device)
        found = self.forward([_Prompt(Inputs(window, Segments((len(tokens),))))])
        logits = torch.empty(self.decoder.model.vocab, dtype=self.dtype, device=device)
        if found:
            logits.copy_(found[0][0, -1])
        dist.broadcast(logits, group=self.group, group_src=self._place[-1])
        return logits


class _Run:
    """A step under way."""

    def __init__(
        self, pipeline: Pipeline, micro_batches: Sequence[Samples], tokens_per_sequence: float, factor: float
    ) -> None:
        self._pipeline = pipeline
        self._micro_batches = micro_batches
        self._tokens_per_sequence = tokens_per_sequence
        self._factor = factor
        self._flights: dict[tuple[int, int], _InFlight] = {}
        self.mail = _Transfers(pipeline, micro_batches)
        self.losses: dict[int, Tensor] = {}

    def forward(self, action: Action) -> None:
        _, number, index, _ = action
        batch, stage = self._micro_batches[index], self._pipeline.stages[number]
        stream = None if stage.first else self.mail.take(Need(True, number, index)).requires_grad_()
        weight = self._tokens_per_sequence * (1.0 if stage.last else self._factor)
        out = self._pipeline.decoder(batch.inputs, weight, stage=stage, stream=stream)
        if stage.last:
            self.losses[index] = out.detach()
            out = out * self._factor
        else:
            self.mail.give(Need(True, number + 1, index), out.detach())
        kept = out if self._pipeline.splits else get_gradient_edge(out)
        self._flights[number, index] = _InFlight(stream, kept)

    def backward(self, action: Action) -> None:
        kind, number, index, _ = action
        splits, stage = self._pipeline.splits, self._pipeline.stages[number]
        if kind is Kind.WEIGHT_GRAD:
            if splits:
                _weight_gradients(self._pipeline.weights[number], self._flights.pop((number, index)))
            return
        flight = self._flights[number, index]
        if not stage.last:
            flight.gradient = self.mail.take(Need(False, number, index))
        if kind is Kind.INPUT_GRAD and splits:
            _input_gradient(self._pipeline.weights[number], flight)
        else:
            del self._flights[number, index]
            _whole_backward(flight)
        if flight.input is not None:
            assert flight.input.grad is not None
            self.mail.give(Need(False, number - 1, index), flight.input.grad)
            flight.input.grad = None


def _whole_backward(flight: _InFlight) -> None:
    torch.autograd.backward(flight.output, flight.gradient)


def _input_gradient(weights: Sequence[nn.Parameter], flight: _InFlight) -> None:
    """Leaves it in `flight.input.grad`. The first stage has none, and does all when its weights' are due."""
    if flight.input is None:
        return
    # Here: half a second that only split backwards need, since it imports torch's compiler.
    from torch.distributed.pipelining._backward import stage_backward_input

    assert isinstance(flight.output, Tensor)
    gradients = None if flight.gradient is None else [flight.gradient]
    _, flight.parts = stage_backward_input([flight.output], gradients, [flight.input], iter(weights))


def _weight_gradients(weights: Sequence[nn.Parameter], flight: _InFlight) -> None:
    if flight.parts is None:
        _whole_backward(flight)
    else:
        from torch.distributed.pipelining._backward import stage_backward_weight

        stage_backward_weight(iter(weights), flight.parts)


class _Transfers:
    """What passes between the stages in one step.

    A receive begins where the plan has it and is waited for where it is needed. A send is never waited for while
    there is work; what a message from a rank tells is that this rank has used all that it needed before, and those
    sends are let go.
    """

    def __init__(self, pipeline: Pipeline, micro_batches: Sequence[Samples]) -> None:
        self._pipeline = pipeline
        self._micro_batches = micro_batches
        self._there: dict[Need, Tensor] = {}
        self._coming: dict[Need, tuple[Message, dist.Work]] = {}
        self._sent: dict[int, deque[tuple[Message, Tensor, dist.Work]]] = {}

    def give(self, need: Need, tensor: Tensor) -> None:
        """`tensor` is for a stage: of this rank, or of another that the plan's message to it names."""
        self._there[need] = tensor

    def take(self, need: Need) -> Tensor:
        """Waits for it, if it comes from another rank."""
        if need in self._coming:
            message, work = self._coming.pop(need)
            work.wait()
            self._release(message.sender, message.made)
        return self._there.pop(need)

    def pass_on(self, message: Message) -> None:
        """Begins to send or to receive."""
        need, group = message.need, self._pipeline.group
        if message.sender == self._pipeline.rank:
            tensor = self._there.pop(need).contiguous()
            work = dist.isend(tensor, group=group, group_dst=message.receiver)
            assert work is not None
            self._sent.setdefault(message.receiver, deque()).append((message, tensor, work))
        else:
            tokens = self._micro_batches[need.microbatch].inputs.tokens
            shape = self._pipeline.decoder.stream_shape(tokens)
            tensor = torch.empty(shape, dtype=self._pipeline.dtype, device=tokens.device)
            work = dist.irecv(tensor, group=group, group_src=message.sender)
            assert work is not None
            self._there[need], self._coming[need] = tensor, (message, work)

    def finish(self) -> None:
        """Waits for what is still being sent."""
        for works in self._sent.values():
            for *_, work in works:
                work.wait()
        self._sent.clear()

    def _release(self, receiver: int, done: int) -> None:
        """Lets go what `receiver` needed up to its action number `done`."""
        works = self._sent.get(receiver)
        while works and works[0][0].used <= done:
            *_, work = works.popleft()
            work.wait()
