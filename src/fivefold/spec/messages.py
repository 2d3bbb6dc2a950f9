"""The messages of a pipeline schedule, placed between the actions of its ranks so that no rank deadlocks."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from fivefold.spec.schedules import Action, Kind


class Need(NamedTuple):
    """The tensor that a stage waits for: in forward its input, else the gradient of its output."""

    forward: bool
    stage: int
    microbatch: int


class Message(NamedTuple):
    """A tensor that one rank sends to another, in both ranks' plans.

    Attributes:
        need: the tensor.
        made: the index in `work` of the sender's action that produces it.
        used: the index in `work` of the receiver's action that uses it.
    """

    need: Need
    sender: int
    receiver: int
    made: int
    used: int


Plan = list[Action | Message]


def plans(work: Sequence[Sequence[Action]], place: Sequence[int]) -> list[Plan]:
    """Every rank's actions, with the messages it sends and receives.

    The plans are parts of one global order. So even a rank that executes its plan strictly in order, and waits for
    every message, cannot deadlock. A message is sent when it is produced, and its receive is posted at the same
    place.

    Args:
        work: the actions of each rank, in order.
        place: the rank of each stage.

    Raises:
        RuntimeError: the actions wait for each other.
    """
    last = len(place) - 1
    used = {need: (rank, number) for rank, own in enumerate(work) for need, number in _needs(own, last)}
    found: list[Plan] = [[] for _ in work]
    there: set[Need] = set()
    done = [0] * len(work)
    while any(number < len(own) for number, own in zip(done, work, strict=True)):
        before = sum(done)
        for rank, own in enumerate(work):
            together = _together(own, done[rank])
            if any(need not in there for need, _ in _needs(together, last)):
                continue
            found[rank] += together
            for number, action in enumerate(together, start=done[rank]):
                need = _makes(action, last)
                if need is None or need not in used:
                    continue
                there.add(need)
                receiver, use = used[need]
                if receiver != rank:
                    message = Message(need, rank, receiver, number, use)
                    found[rank].append(message)
                    found[receiver].append(message)
            done[rank] += len(together)
        if sum(done) == before:
            raise RuntimeError("the schedule's lists wait for one another")
    return found


def receives_first(plan: Plan, rank: int) -> Plan:
    """A rank's plan with the receives of adjacent messages before the sends.

    For backends whose calls return immediately (gloo, shm): if both ends start with a send, gloo uses one direction of
    the link at a time. Not for NCCL, where each call waits for the previous one.
    """
    found: Plan = []
    for is_message, entries in groupby(plan, lambda entry: isinstance(entry, Message)):
        run = list(entries)
        found += sorted(run, key=lambda entry: entry.receiver != rank) if is_message else run  # type: ignore[union-attr]
    return found


def _together(own: Sequence[Action], start: int) -> Sequence[Action]:
    """The next action and those joined to it, whose results are sent when all are done."""
    end = start
    while end < len(own) and own[end].joined:
        end += 1
    return own[start : end + 1]


def _needs(actions: Sequence[Action], last: int) -> list[tuple[Need, int]]:
    """The tensors that some actions wait for, with the index of the action."""
    found = []
    for number, (kind, stage, microbatch, _) in enumerate(actions):
        if (kind is Kind.FORWARD and stage > 0) or (
            kind in (Kind.INPUT_GRAD, Kind.BACKWARD) and stage < last
        ):
            found.append((Need(kind is Kind.FORWARD, stage, microbatch), number))
    return found


def _makes(action: Action, last: int) -> Need | None:
    if action.kind is Kind.FORWARD and action.stage < last:
        return Need(True, action.stage + 1, action.microbatch)
    if action.kind in (Kind.INPUT_GRAD, Kind.BACKWARD) and action.stage > 0:
        return Need(False, action.stage - 1, action.microbatch)
    return None
