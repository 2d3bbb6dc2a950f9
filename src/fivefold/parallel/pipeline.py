"""Pipeline parallel: the stages of one rank, and a schedule's step over them. Twin of ledger/pipeline.py.

Schedules are the action lists of torch.distributed.pipelining (`spec/schedules.py`; a test holds them to torch's
own), a backward is split into input and weight gradients by torch's functions. The loop that runs the lists is ours:
torch's keeps a receive buffer for every micro-batch and both directions, and all that was sent until the step ends,
so that no schedule would hold the number of micro-batches in flight that it is chosen for.

Every rank of a pipeline reads the same samples, so only hidden states and their gradients cross between stages.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from fivefold.collectives.record import Phase
from fivefold.nn.attention import Segments
from fivefold.nn.decoder import Decoder
from fivefold.spec import schedules
from fivefold.spec.messages import Message, Need, Plan, plans
from fivefold.spec.schedules import Action, Kind

_PHASES: dict[bool, Phase] = {True: "forward", False: "backward"}

InPhase = Callable[[Phase], AbstractContextManager[None]]


class Samples(Protocol):
    """A micro-batch. Tokens and labels: `[micro_batch, sequence]`, int64."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def segments(self) -> Segments: ...


@dataclass(slots=True)
class _Flight:
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


class Pipeline:
    """The stages of one rank.

    Args:
        name: of the schedule.
        stages: this rank's, by their number in the pipeline.
        group: the ranks of the pipeline, in its order.
        micro_batches: of a step.
        splits: whether the schedule's split of backward is followed. If not, a stage's whole backward is done when its
            input gradient is due: cheaper where a layer is recomputed in backward, since each half would do that.
        phase: of the recorder.
    """

    def __init__(
        self,
        name: schedules.Name,
        stages: Mapping[int, Decoder],
        group: dist.ProcessGroup,
        micro_batches: int,
        *,
        splits: bool,
        phase: InPhase,
    ) -> None:
        self.stages = dict(sorted(stages.items()))
        self.group = group
        module = next(iter(self.stages.values()))
        self.hidden, self.dtype = module.model.hidden, next(module.parameters()).dtype
        self.splits = splits and name in schedules.SPLITS_BACKWARD
        self._phase = phase
        self._name = name
        ranks, self.rank = group.size(), group.rank()
        self.ranks, self._count = ranks, ranks * len(stages)
        self._place = [schedules.rank_of_stage(name, stage, ranks) for stage in range(self._count)]
        self._micro_batches = micro_batches
        work = schedules.actions(name, ranks, micro_batches, len(stages))
        self._plan = plans(work, self._place)[self.rank]
        self._forward_plan = lru_cache(maxsize=4)(self._planned_forward)

    def step(self, micro_batches: Sequence[Samples], tokens_per_sequence: float, factor: float) -> float:
        """Adds the gradients of a step's micro-batches to the stages' parameters.

        Args:
            micro_batches: as many as the schedule was made for.
            tokens_per_sequence: see `Decoder.forward`.
            factor: on the summed loss, before backward.

        Returns:
            The summed loss of the micro-batches, on the rank of the last stage; 0 on the others.
        """
        assert len(micro_batches) == self._micro_batches
        run = _Run(self, micro_batches)
        losses: dict[int, Tensor] = {}
        for entry in self._plan:
            if isinstance(entry, Message):
                run.mail.pass_on(entry)
            elif entry.kind is Kind.FORWARD:
                with self._phase("forward"):
                    run.forward(entry, tokens_per_sequence, factor, losses)
            else:
                with self._phase("backward"):
                    run.backward(entry)
        run.mail.finish()
        return sum(losses[number].item() for number in sorted(losses))

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[Samples], *, loss: bool) -> list[Tensor]:
        """What the last stage returns for each micro-batch (of any number), on its rank; empty on the others.

        Args:
            loss: of the labels; otherwise the logits.
        """
        mail = _Mail(self, micro_batches)
        found = []
        for entry in self._forward_plan(len(micro_batches)):
            if isinstance(entry, Message):
                mail.pass_on(entry)
                continue
            _, stage, number, _ = entry
            batch, module = micro_batches[number], self.stages[stage]
            x = batch.tokens if module.first else mail.take(Need(True, stage, number))
            out = module(x, batch.segments, batch.labels if loss else None)
            if module.last:
                found.append(out)
            else:
                mail.give(Need(True, stage + 1, number), out)
        mail.finish()
        return found

    def from_last(self, tensor: Tensor) -> Tensor:
        """Fills `tensor`, on all ranks of the pipeline, with that of the last stage's rank."""
        dist.broadcast(tensor, group=self.group, group_src=self._place[-1])
        return tensor

    def _planned_forward(self, count: int) -> Plan:
        """Each stage takes all micro-batches before the next: nothing is kept but what passes on."""
        own = [[stage for stage, rank in enumerate(self._place) if rank == other] for other in range(self.ranks)]
        work = [[Action(Kind.FORWARD, s, m) for s in stages for m in range(count)] for stages in own]
        return plans(work, self._place)[self.rank]


class _Run:
    """A step under way."""

    def __init__(self, pipeline: Pipeline, micro_batches: Sequence[Samples]) -> None:
        self._stages = pipeline.stages
        self._splits = pipeline.splits
        self._micro_batches = micro_batches
        self._flights: dict[tuple[int, int], _Flight] = {}
        self.mail = _Mail(pipeline, micro_batches)

    def forward(
        self, action: Action, tokens_per_sequence: float, factor: float, losses: dict[int, Tensor]
    ) -> None:
        _, stage, number, _ = action
        batch, module = self._micro_batches[number], self._stages[stage]
        received = None if module.first else self.mail.take(Need(True, stage, number)).requires_grad_()
        x = batch.tokens if received is None else received
        weight = tokens_per_sequence * (1.0 if module.last else factor)
        out = module(x, batch.segments, batch.labels, weight)
        if module.last:
            losses[number] = out.detach()
            out = out * factor
        else:
            self.mail.give(Need(True, stage + 1, number), out.detach())
        self._flights[stage, number] = _Flight(received, out if self._splits else get_gradient_edge(out))

    def backward(self, action: Action) -> None:
        kind, stage, number, _ = action
        module = self._stages[stage]
        if kind is Kind.WEIGHT_GRAD:
            if self._splits:
                _weight_gradients(module, self._flights.pop((stage, number)))
            return
        flight = self._flights[stage, number]
        if not module.last:
            flight.gradient = self.mail.take(Need(False, stage, number))
        if kind is Kind.INPUT_GRAD and self._splits:
            _input_gradient(module, flight)
        else:
            del self._flights[stage, number]
            _whole_backward(flight)
        if flight.input is not None:
            assert flight.input.grad is not None
            self.mail.give(Need(False, stage - 1, number), flight.input.grad)
            flight.input.grad = None


def _whole_backward(flight: _Flight) -> None:
    torch.autograd.backward(flight.output, flight.gradient)


def _input_gradient(module: nn.Module, flight: _Flight) -> None:
    """Leaves it in `flight.input.grad`. The first stage has none, and does all when its weights' are due."""
    if flight.input is None:
        return
    assert isinstance(flight.output, Tensor)
    gradients = None if flight.gradient is None else [flight.gradient]
    _, flight.parts = stage_backward_input([flight.output], gradients, [flight.input], module.parameters())


def _weight_gradients(module: nn.Module, flight: _Flight) -> None:
    if flight.parts is None:
        _whole_backward(flight)
    else:
        stage_backward_weight(module.parameters(), flight.parts)


class _Mail:
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
        pipeline, need = self._pipeline, message.need
        with pipeline._phase(_PHASES[need.forward]):
            if message.sender == pipeline.rank:
                tensor = self._there.pop(need).contiguous()
                work = dist.isend(tensor, group=pipeline.group, group_dst=message.receiver)
                assert work is not None
                self._sent.setdefault(message.receiver, deque()).append((message, tensor, work))
            else:
                tensor = self._empty(need)
                work = dist.irecv(tensor, group=pipeline.group, group_src=message.sender)
                assert work is not None
                self._there[need], self._coming[need] = tensor, (message, work)

    def finish(self) -> None:
        """Waits for what is still being sent."""
        for works in self._sent.values():
            for *_, work in works:
                work.wait()
        self._sent.clear()

    def _empty(self, need: Need) -> Tensor:
        """`[micro_batch, sequence, hidden]`"""
        tokens, pipeline = self._micro_batches[need.microbatch].tokens, self._pipeline
        shape = (*tokens.shape, pipeline.hidden)
        return torch.empty(shape, dtype=pipeline.dtype, device=tokens.device)

    def _release(self, receiver: int, done: int) -> None:
        """Lets go what `receiver` needed up to its action number `done`."""
        works = self._sent.get(receiver)
        while works and works[0][0].used <= done:
            *_, work = works.popleft()
            work.wait()
