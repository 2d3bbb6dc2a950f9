"""Pipeline parallel: the stages of one rank, and the schedule that runs a step over them. Twin: ledger/pipeline.py.

Schedules are the action lists of torch.distributed.pipelining (`spec/schedules.py`; a test compares them with torch's),
and a backward is split into input and weight gradients by torch's functions. The loop over the actions is our own:
torch's keeps a receive buffer per micro-batch and direction, and everything sent, until the step ends. With it no
schedule would have the low number of micro-batches in flight that it is chosen for.

Every rank of a pipeline reads the same samples, so only hidden states and their gradients are sent between stages.
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
    """The text to continue, as a micro-batch of one row."""

    inputs: Inputs


class TiedCopy(NamedTuple):
    """The tied embedding on the first stage's rank, or the head that is its copy on the last stage's.

    Attributes:
        group: the two ranks.
        rows: the most vocabulary rows that any rank keeps; gradients with fewer rows are padded to it.
    """

    parameter: LocalParameter
    group: dist.ProcessGroup
    rows: int

    def reduce(self) -> None:
        """Sums the gradients of both copies; the result has the same bits on both, so the copies stay equal."""
        gradient = self.parameter.gradient()
        assert gradient is not None
        lacking = self.rows - gradient.shape[0]
        both = torch.nn.functional.pad(gradient, (0, 0, 0, lacking)) if lacking else gradient
        dist.all_reduce(both, group=self.group)
        if lacking:
            gradient.copy_(both[: gradient.shape[0]])


@dataclass(slots=True)
class _InFlight:
    """A micro-batch in flight on a stage, between its forward and the end of its backward.

    Attributes:
        input: the received hidden states, a leaf of autograd; None on the first stage.
        output: hidden states, or on the last stage the scaled loss. Where backward is not split, only its gradient
            edge: the values are not needed any more.
        gradient: of the output; None for the loss.
        parts: the parts of the graph that are left after the input gradient (see torch's `stage_backward_input`).
    """

    input: Tensor | None
    output: Tensor | GradientEdge
    gradient: Tensor | None = None
    parts: list[dict[str, Any]] | None = None


def rank_stages(model: Model, name: schedules.Name, chunks: int, ranks: int, rank: int) -> dict[int, Stage]:
    """The stages of a pipeline rank, by stage number."""
    all_stages = pipeline_stages(model, ranks * schedules.chunks_of(name, chunks))
    return {number: all_stages[number] for number in schedules.stages_of_rank(name, rank, ranks, chunks)}


class Pipeline:
    """One rank's stages and the schedule over them.

    Args:
        name: the schedule.
        decoder: this rank's part of the model, with the modules of all its stages.
        stages: this rank's stages, by stage number.
        group: the pipeline group, in pipeline order.
        dtype: of the hidden states sent between stages.
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
        # With recomputed layers each half of a split backward would recompute them (torch's selective checkpoint even
        # refuses): the whole backward of a stage then runs where the schedule has its input gradient.
        self.splits = name in schedules.SPLITS_BACKWARD and decoder.recompute in ("none", "attention")
        self.rank, ranks, chunks = group.rank(), group.size(), len(stages)
        self.weights = {number: decoder.stage_parameters(stage) for number, stage in self.stages.items()}
        self._name = name
        self._place = [schedules.rank_of_stage(name, stage, ranks) for stage in range(ranks * chunks)]
        self._plans: dict[int, Plan] = {}  # by number of micro-batches

    def step(
        self, micro_batches: Sequence[Samples], tokens_per_sequence: float, factor: float, recorder: Recorder
    ) -> float:
        """Accumulates the gradients of a step's micro-batches into the parameters' `grad`.

        Args:
            micro_batches: as many as the schedule allows (`spec.schedules.is_legal`).
            tokens_per_sequence: see `Decoder.forward`.
            factor: multiplies the summed loss before backward.

        Returns:
            The summed loss of the micro-batches on the rank of the last stage, 0 on the others.
        """
        run = _Run(self, micro_batches, tokens_per_sequence, factor)
        for entry in self._plan(len(micro_batches)):
            if isinstance(entry, Message):
                with recorder.phase("forward" if entry.need.forward else "backward"):
                    run.transfers.start(entry)
            elif entry.kind is Kind.FORWARD:
                with recorder.phase("forward"):
                    run.forward(entry)
            else:
                with recorder.phase("backward"):
                    run.backward(entry)
        run.transfers.finish()
        return sum(run.losses[number].item() for number in sorted(run.losses))

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[Samples]) -> list[Tensor]:
        """The last stage's outputs for any number of micro-batches, on its rank; an empty list on the others.

        Each stage runs all micro-batches before the rank's next stage starts, and keeps only what it sends on.
        """
        ranks, count = self.group.size(), len(micro_batches)
        own = [[stage for stage, rank in enumerate(self._place) if rank == other] for other in range(ranks)]
        work = [[Action(Kind.FORWARD, s, m) for s in stages for m in range(count)] for stages in own]
        transfers, found = _Transfers(self, micro_batches), []
        for entry in self._ordered(plans(work, self._place)[self.rank]):
            if isinstance(entry, Message):
                transfers.start(entry)
                continue
            _, number, index, _ = entry
            batch, stage = micro_batches[index], self.stages[number]
            stream = None if stage.first else transfers.take(Need(True, number, index))
            out = self.decoder(batch.inputs, stage=stage, stream=stream)
            if stage.last:
                found.append(out)
            else:
                transfers.put(Need(True, number + 1, index), out)
        transfers.finish()
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
        """Logits of the token that follows `tokens`, `[vocabulary]`, on every rank."""
        window = torch.tensor([list(tokens)], device=device)
        found = self.forward([_Prompt(Inputs(window, Segments((len(tokens),))))])
        logits = torch.empty(self.decoder.model.vocab, dtype=self.dtype, device=device)
        if found:
            logits.copy_(found[0][0, -1])
        dist.broadcast(logits, group=self.group, group_src=self._place[-1])
        return logits


class _Run:
    """The state of one step."""

    def __init__(
        self, pipeline: Pipeline, micro_batches: Sequence[Samples], tokens_per_sequence: float, factor: float
    ) -> None:
        self._pipeline = pipeline
        self._micro_batches = micro_batches
        self._tokens_per_sequence = tokens_per_sequence
        self._factor = factor
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self.transfers = _Transfers(pipeline, micro_batches)
        self.losses: dict[int, Tensor] = {}

    def forward(self, action: Action) -> None:
        _, number, index, _ = action
        batch, stage = self._micro_batches[index], self._pipeline.stages[number]
        stream = None if stage.first else self.transfers.take(Need(True, number, index)).requires_grad_()
        weight = self._tokens_per_sequence * (1.0 if stage.last else self._factor)
        out = self._pipeline.decoder(batch.inputs, weight, stage=stage, stream=stream)
        if stage.last:
            self.losses[index] = out.detach()
            out = out * self._factor
        else:
            self.transfers.put(Need(True, number + 1, index), out.detach())
        kept = out if self._pipeline.splits else get_gradient_edge(out)
        self._in_flight[number, index] = _InFlight(stream, kept)

    def backward(self, action: Action) -> None:
        kind, number, index, _ = action
        splits, stage = self._pipeline.splits, self._pipeline.stages[number]
        if kind is Kind.WEIGHT_GRAD:
            if splits:
                _weight_gradients(self._pipeline.weights[number], self._in_flight.pop((number, index)))
            return
        flight = self._in_flight[number, index]
        if not stage.last:
            flight.gradient = self.transfers.take(Need(False, number, index))
        if kind is Kind.INPUT_GRAD and splits:
            _input_gradient(self._pipeline.weights[number], flight)
        else:
            del self._in_flight[number, index]
            _whole_backward(flight)
        if flight.input is not None:
            assert flight.input.grad is not None
            self.transfers.put(Need(False, number - 1, index), flight.input.grad)
            flight.input.grad = None


def _whole_backward(flight: _InFlight) -> None:
    torch.autograd.backward(flight.output, flight.gradient)


def _input_gradient(weights: Sequence[nn.Parameter], flight: _InFlight) -> None:
    """Computes `flight.input.grad`. The first stage has no input and runs its whole backward with the weight
    gradients."""
    if flight.input is None:
        return
    # Imported here, since it imports torch's compiler: 0.5 s that only split backwards need.
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
    """The tensors that stages pass to each other in one step, within this rank and between ranks.

    A receive starts where the plan has it and is waited for where the tensor is used. Sends are not waited for while
    there is work to do. A tensor that was sent is freed when a later message from its receiver shows that the receiver
    has used it.
    """

    def __init__(self, pipeline: Pipeline, micro_batches: Sequence[Samples]) -> None:
        self._pipeline = pipeline
        self._micro_batches = micro_batches
        self._available: dict[Need, Tensor] = {}
        self._receiving: dict[Need, tuple[Message, dist.Work]] = {}
        self._sent: dict[int, deque[tuple[Message, Tensor, dist.Work]]] = {}

    def put(self, need: Need, tensor: Tensor) -> None:
        """Makes `tensor` available to the stage that needs it, here or (by a later `start`) on another rank."""
        self._available[need] = tensor

    def take(self, need: Need) -> Tensor:
        """The tensor that a stage needs; waits for it if it comes from another rank."""
        if need in self._receiving:
            message, work = self._receiving.pop(need)
            work.wait()
            self._release(message.sender, message.made)
        return self._available.pop(need)

    def start(self, message: Message) -> None:
        """Starts the send or the receive of a message of the plan."""
        need, group = message.need, self._pipeline.group
        if message.sender == self._pipeline.rank:
            tensor = self._available.pop(need).contiguous()
            work = dist.isend(tensor, group=group, group_dst=message.receiver)
            assert work is not None
            self._sent.setdefault(message.receiver, deque()).append((message, tensor, work))
        else:
            tokens = self._micro_batches[need.microbatch].inputs.tokens
            shape = self._pipeline.decoder.stream_shape(tokens)
            tensor = torch.empty(shape, dtype=self._pipeline.dtype, device=tokens.device)
            work = dist.irecv(tensor, group=group, group_src=message.sender)
            assert work is not None
            self._available[need], self._receiving[need] = tensor, (message, work)

    def finish(self) -> None:
        """Waits for all sends."""
        for works in self._sent.values():
            for *_, work in works:
                work.wait()
        self._sent.clear()

    def _release(self, receiver: int, done: int) -> None:
        """Frees the tensors that `receiver` has used by its action number `done`."""
        works = self._sent.get(receiver)
        while works and works[0][0].used <= done:
            *_, work = works.popleft()
            work.wait()
