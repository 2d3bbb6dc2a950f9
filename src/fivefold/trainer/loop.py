"""The training loop: steps, evaluations and checkpoints, from the first step or a checkpoint to the last step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path

import torch

from fivefold.collectives.compression.state import SHARED
from fivefold.config.errors import RunFailed
from fivefold.config.load import dump
from fivefold.data.mixture import Mixture
from fivefold.ledger.flops import forward_per_token
from fivefold.nn.dropout import step_key
from fivefold.nn.generate import generate
from fivefold.nn.hub.weights import HubWeights
from fivefold.observe.clock import StepClock
from fivefold.observe.metrics import StepMetrics
from fivefold.observe.observer import Observer
from fivefold.parallel.apply import ParallelModel, parallelize
from fivefold.parallel.local import load
from fivefold.parallel.mesh import groups
from fivefold.spec.batch import BatchPlan
from fivefold.spec.legal import Resolved
from fivefold.trainer import machine
from fivefold.trainer.batches import MicroBatch, held_out_share, training_share
from fivefold.trainer.checkpoint import Checkpointer
from fivefold.trainer.checkpoint_directory import CheckpointError
from fivefold.trainer.evaluate import evaluate
from fivefold.trainer.identity import identity, refuse_change
from fivefold.trainer.loss_scale import LossScale
from fivefold.trainer.optimizer import LocalOptimizer
from fivefold.trainer.profile import StepProfile
from fivefold.trainer.session import Session
from fivefold.trainer.state import COMPRESSION, Counters, RegroupedCompression, tensors
from fivefold.trainer.step import Stepper, StepResult


class RunError(RunFailed):
    """The run cannot continue; every rank raises it in the same step."""


@dataclass(slots=True)
class Loop:
    """One rank's run: what a step needs, the counters of its progress, and the observer it reports to."""

    session: Session
    resolved: Resolved
    samples: Mixture
    checkpoints: Checkpointer
    stop_requested: Callable[[], bool]
    observer: Observer = field(default_factory=Observer)
    stepper: Stepper = field(init=False)
    counters: Counters = field(default_factory=Counters)
    last_loss: float = nan
    last_evaluation: float | None = None
    saved_step: int | None = None
    profiled: bool = False

    def __post_init__(self) -> None:
        session, config = self.session, self.resolved.config
        on_axes = groups(self.resolved, session.rank, session.ranks_per_host)
        model = parallelize(self.resolved, on_axes, session.rank, session.device)
        self.stepper = Stepper(
            model,
            LocalOptimizer(config.optimizer, model.parameters),
            session.agreement,
            session.recorder,
            StepClock(),
            LossScale.of(config.precision),
            config.optimizer.clip,
        )

    @property
    def model(self) -> ParallelModel:
        return self.stepper.model

    @property
    def data_rank(self) -> int:
        return self.resolved.mesh.data_rank(self.session.rank)

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint. Collective."""
        return self.checkpoints.latest()

    def restore(self) -> None:
        """Loads the newest complete checkpoint, if there is one. Collective.

        Raises:
            BadInput: the checkpoint belongs to a config of another identity (`trainer.identity`).
            CheckpointError: the checkpoint is damaged, or holds other tensors.
        """
        path = self.checkpoints.latest()
        if path is None:
            return
        regrouped = RegroupedCompression(self.model, self.checkpoints.shapes(path))
        stored = self.checkpoints.load(
            path,
            regrouped.asked(tensors(self.model, self.stepper.optimizer)),
            lambda counters: refuse_change(counters.get("identity", {}), self._identity(), path),
            self._left,
        )
        regrouped.adopt()
        del stored["identity"]
        scale = stored.pop("loss_scale")
        self.counters = Counters(**stored)
        self.stepper.optimizer.set_updates(self.counters.updates)
        if scale and self._has_loss_scale:  # a run may be resumed in another precision
            self.stepper.loss_scale.value, self.stepper.loss_scale.good_steps = scale
        self.saved_step = self.counters.step
        self.model.data.updated()

    def _left(self, unasked: list[str]) -> list[str]:
        """Of what a checkpoint holds and no rank asks for, what a run may do without: PowerSGD's factors."""
        return [name for name in unasked if name.startswith(COMPRESSION + SHARED)]

    def start_from(self, weights: HubWeights) -> None:
        """Replaces the initial values by a Hugging Face model's weights; each rank reads its own parts."""
        for parameter in self.model.parameters:
            load(parameter, weights)
        self.model.data.updated()

    def steps(self, count: int) -> None:
        """Takes `count` steps, without evaluations and checkpoints."""
        self.session.recorder.clear()
        self.stepper.clock.lap()
        for _ in range(count):
            self._step()

    def run(self) -> str:
        """Trains until the last step or until the ranks agree to stop; returns how it ended."""
        run, checkpoint = self.resolved.config.run, self.resolved.config.checkpoint
        self.session.recorder.clear()
        self.stepper.clock.lap()
        stopping = False
        while self.counters.step < run.steps and not stopping:
            stopping = self._step()
            step = self.counters.step
            if run.eval_every and step % run.eval_every == 0 and step < run.steps and not stopping:
                self._evaluate()
            if checkpoint.every and step % checkpoint.every == 0 and step < run.steps and not stopping:
                self._save(asynchronous=checkpoint.asynchronous)
        self._finish_save()
        if self.saved_step != self.counters.step:
            self._save(asynchronous=False)
        if stopping:
            return "stopped as asked"
        self._evaluate()
        return "done"

    def _step(self) -> bool:
        """One optimizer step and its report; returns whether the ranks agreed to stop."""
        step = self.counters.step + 1
        try:
            return self._take_step()
        except Exception as error:
            error.add_note(f"in step {step}")
            raise

    def _take_step(self) -> bool:
        clock, counters = self.stepper.clock, self.counters
        plan = self.resolved.course.at(counters.samples)
        with clock.measure("data"):
            share = training_share(
                self.samples,
                plan,
                counters.samples,
                self.data_rank,
                self.session.device,
                self.resolved.spans(self.session.rank),
                step_key(self.resolved.config.run.seed, counters.step),
            )
        learning_rate = self.resolved.learning_rate.at(counters.tokens + plan.global_batch_tokens)
        stop_asked = self.stop_requested() or self.observer.output_closed
        flags = (float(stop_asked), float(self.checkpoints.poll()))
        take_step = self.stepper.step if self.profiled else self._profiled_step
        result = take_step(share, learning_rate, flags)
        counters.advance(plan.global_batch, plan.global_batch_tokens, result.skipped is not None)
        stop, saved = result.flags
        if saved == self.session.world_size:
            self._finish_save()
        self._report(result, learning_rate, plan)
        return stop > 0

    def _profiled_step(
        self, share: Sequence[MicroBatch], learning_rate: float, flags: Sequence[float]
    ) -> StepResult:
        """The first step after a start, with memory by category measured and reported."""
        self.profiled = True
        with StepProfile(self.model, self.stepper.optimizer) as profile, self.session.profiled():
            result = self.stepper.step(share, learning_rate, flags, profile.inspect)
        self.observer.memory(profile.memory)
        return result

    def _report(self, result: StepResult, learning_rate: float, plan: BatchPlan) -> None:
        """Reports a step to the observer; ends the run after too many skipped steps in a row."""
        self.last_loss = result.loss
        self.observer.step(self._metrics(result, learning_rate, plan))
        self.session.recorder.clear()
        if result.skipped is None:
            return
        counters, most = self.counters, self.resolved.config.precision.max_skips
        line = f"step {counters.step}: update skipped on all ranks, gradient not finite; {result.skipped}"
        self.observer.note(line)
        if counters.skips_in_a_row > most:
            raise RunError(f"{line}; {counters.skips_in_a_row} skips in a row (precision.max_skips)")

    def _metrics(self, result: StepResult, learning_rate: float, plan: BatchPlan) -> StepMetrics:
        """The metrics of the step that just ended."""
        config, session = self.resolved.config, self.session
        seconds = self.stepper.clock.lap()
        flops_per_token = 3 * forward_per_token(config.model, plan.sequence_length, "causal").total
        flops_per_second = flops_per_token * plan.global_batch_tokens / sum(seconds.values())
        peak = config.machine.peak_flops * session.world_size
        return StepMetrics(
            step=self.counters.step,
            tokens=self.counters.tokens,
            step_tokens=plan.global_batch_tokens,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=learning_rate,
            seconds=seconds,
            memory_bytes=machine.memory_bytes(session.device),
            mfu=flops_per_second / peak if peak else None,
            loss_scale=result.loss_scale if self._has_loss_scale else None,
            skipped=result.skipped is not None,
            expert_load=result.expert_load,
            traffic=session.recorder.bytes_by_axis(),
            exposed_seconds=session.recorder.exposed_by_axis(),
        )

    def _evaluate(self) -> None:
        """Computes the held-out loss and reports it. Collective."""
        config, plan = self.resolved.config, self.resolved.batch
        if not self.samples.validation_count:
            return
        batches = self.samples.validation_batches(plan.global_batch, config.run.eval_batches)
        spans = self.resolved.spans(self.session.rank)
        shares = (
            held_out_share(batch, plan, self.data_rank, self.session.device, spans) for batch in batches
        )
        with self.session.recorder.paused():
            self.last_evaluation = evaluate(self.model, shares, self.session.agreement)
        self.observer.evaluation(self.counters.step, self.last_evaluation)

    def _save(self, asynchronous: bool) -> None:
        """Starts a checkpoint of this step, and finishes it if not asynchronous."""
        self._finish_save()
        state = tensors(self.model, self.stepper.optimizer)
        scale = self.stepper.loss_scale
        counters = self.counters.to_dict() | {
            "identity": self._identity(),
            "loss_scale": [scale.value, scale.good_steps] if self._has_loss_scale else None,
        }
        text = dump(self.resolved.config)
        with self.session.recorder.paused(), self.stepper.clock.measure("checkpoint"):
            self.checkpoints.save(self.counters.step, state, counters, text, asynchronous=asynchronous)
        self.saved_step = self.counters.step

    def _finish_save(self) -> None:
        """Waits for the save in progress. If it failed, that is reported, and training continues with the checkpoint
        before it."""
        try:
            with self.stepper.clock.measure("checkpoint"):
                self.checkpoints.wait()
        except CheckpointError as error:
            self.saved_step = None
            self.observer.note(f"step {self.counters.step}: checkpoint failed, training goes on: {error}")

    @property
    def _has_loss_scale(self) -> bool:
        return self.resolved.config.precision.dtype == "fp16"

    def _identity(self) -> dict[str, object]:
        return identity(self.resolved.config, self.samples.digest())

    def sample(self, prompt: list[int], count: int) -> list[int]:
        """Continues `prompt` by `count` tokens. Collective: every rank draws the same tokens."""
        config = self.resolved.config
        with self.session.recorder.paused(), torch.no_grad():
            return generate(
                self.model.next_logits,
                prompt,
                count,
                context=config.batch.sequence_length,
                temperature=0.8,
                top_k=40,
                seed=config.run.seed,
            )
