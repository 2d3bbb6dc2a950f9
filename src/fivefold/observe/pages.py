"""The start page, the memory page and the end page: data in, something rich can print out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from fivefold.config.tree import Config, Parallel
from fivefold.observe.facts import EndFacts, SourceFacts, StartFacts
from fivefold.observe.grid import layout_picture
from fivefold.render.units import bytes_text, count_text, duration_text, flops_text, lr_text, rate_text
from fivefold.spec.legal import Resolved
from fivefold.spec.mesh import Mesh
from fivefold.spec.parameters import active, total

if TYPE_CHECKING:
    from fivefold.observe.memory import MemoryByCategory

WELL_BELOW_NATS = 0.5  # a token is then e^0.5 = 1.6 times likelier than its frequency alone makes it

_ZERO = (
    "nothing",
    "optimizer state",
    "optimizer state and gradients",
    "optimizer state, gradients and parameters",
)
_PRECISION = {
    "float64": "float64 throughout",
    "float32": "float32 throughout",
    "bf16": "bf16 compute; float32 master weights and reductions",
    "fp16": "fp16 compute with a dynamic loss scale; float32 master weights and reductions",
}


def start_page(facts: StartFacts) -> RenderableType:
    """What is about to run, each derived value with its reason."""
    resolved, config = facts.resolved, facts.resolved.config
    start = f", resumed after step {facts.start_step}" if facts.start_step else ""
    rows: list[tuple[str, RenderableType]] = [
        ("model", _model(config)),
        ("layout", _layout(resolved)),
        ("batch", _batch(resolved)),
        ("learning rate", _learning_rate(resolved)),
        ("data", _data(facts)),
        ("precision", _PRECISION[config.precision.dtype]),
        ("device", facts.device),
        ("machine", facts.matmul),
        ("peak", f"{flops_text(facts.peak_flops)} a rank, {facts.peak_source}; MFU is stated against it"),
        ("run", str(facts.directory)),
    ]
    return _page(f"Fivefold trains {config.run.name or facts.directory.name}{start}", rows)


def memory_page(memory: MemoryByCategory) -> RenderableType:
    """Memory by category, a bar each; the largest category fills the column."""
    sizes = asdict(memory)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(max_width=30)
    for name, size in sizes.items():
        table.add_row(name, bytes_text(size), Bar(max(*sizes.values(), 1), 0, size, color="cyan"))
    return _rows([("memory", Group(f"{bytes_text(memory.total)} on rank 0, in one profiled step", table))])


def end_page(facts: EndFacts) -> RenderableType:
    """What came of it, held against the unigram entropy."""
    rows: list[tuple[str, RenderableType]] = [
        ("loss", f"{facts.loss:.3f} at step {facts.step}, {against(facts.loss, facts.unigram_entropy)}")
    ]
    losses = [facts.loss]
    if facts.evaluation_loss is not None:
        losses.append(facts.evaluation_loss)
        gap = against(facts.evaluation_loss, facts.unigram_entropy)
        rows.append(("evaluation", f"{facts.evaluation_loss:.3f} on held-out samples, {gap}"))
    rows += [
        ("", _verdict(losses, facts.unigram_entropy)),
        (
            "speed",
            f"{count_text(facts.tokens)} tokens in {duration_text(facts.seconds)}, "
            f"{rate_text(facts.tokens / max(facts.seconds, 1e-9), 'tokens')} on average",
        ),
        ("checkpoint", str(facts.checkpoint) if facts.checkpoint else "none written"),
    ]
    if facts.sample:
        rows.append(("sample", Text(printable(facts.sample), "italic")))
    if facts.next_commands:
        rows.append(("try next", _commands(facts.next_commands)))
    return _page(facts.ended[:1].upper() + facts.ended[1:], rows)


def _page(title: str, rows: Sequence[tuple[str, RenderableType]]) -> RenderableType:
    rule = Rule(Text(title, "bold"), align="left", style="dim")
    return Group(Text(), rule, Text(), _rows(rows), Text())


def _rows(rows: Sequence[tuple[str, RenderableType]]) -> RenderableType:
    """Labels at the left, values beside them; long values wrap in their own column."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=14, no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(Text(f" {label}"), Text(value) if isinstance(value, str) else value)
    return table


def _model(config: Config) -> str:
    model = config.model
    heads = f"{model.heads} heads"
    if model.kv_heads != model.heads:
        heads += f" ({model.kv_heads} for keys and values)"
    parts = [f"{model.layers} layers", f"hidden {model.hidden}", heads]
    if model.experts.count:
        parts.append(f"{model.experts.count} experts of {model.experts.ffn}, top {model.experts.top_k}")
    else:
        parts.append(f"feed-forward {model.ffn}")
    parts.append(f"vocabulary {model.vocab:,}")
    size = f"{count_text(total(model))} parameters"
    if model.experts.count:
        size += f", {count_text(active(model))} active for a token"
    name = f"{model.preset}: " if model.preset else ""
    return f"{name}{size}\n{' · '.join(parts)}"


def _layout(resolved: Resolved) -> RenderableType:
    mesh, parallel = resolved.mesh, resolved.config.parallel
    facts = _layout_facts(mesh, parallel)
    if mesh.world_size == 1:
        return Text("\n".join(["one rank", *facts]))
    return Group(f"{mesh} = {mesh.world_size} ranks", layout_picture(mesh), *facts)


def _layout_facts(mesh: Mesh, parallel: Parallel) -> list[str]:
    """What the picture of ranks does not show."""
    parts = []
    if parallel.zero:
        over = "dp_shard × cp" if mesh.cp > 1 else "dp_shard"
        parts.append(f"zero {parallel.zero}: {_ZERO[parallel.zero]} split over {over}")
    if mesh.pp > 1:
        chunks = f", {parallel.chunks} chunks a rank" if parallel.chunks > 1 else ""
        parts.append(f"{parallel.schedule} schedule{chunks}")
    if parallel.ep > 1:
        parts.append(f"ep {parallel.ep}, re-using dp_shard × cp")
    if mesh.cp > 1:
        parts.append(f"context parallel by {parallel.context}")
    if parallel.sequence_parallel:
        parts.append("sequence parallel")
    if parallel.recompute != "none":
        parts.append(f"recompute {parallel.recompute}")
    return parts


def _batch(resolved: Resolved) -> str:
    plan, course = resolved.batch, resolved.course
    return (
        f"{plan.global_batch:,} sequences × {plan.sequence_length:,} tokens = "
        f"{plan.global_batch_tokens:,} tokens a step\n{plan.reason}"
        + (f"\n{course.reason}" if course.growths else "")
    )


def _learning_rate(resolved: Resolved) -> str:
    return f"peak {lr_text(resolved.learning_rate.peak)} {_peak_reason(resolved)}\n{_lr_course(resolved)}"


def _peak_reason(resolved: Resolved) -> str:
    optimizer = resolved.config.optimizer
    if optimizer.lr_scaling == "none" or not optimizer.lr_reference_batch:
        return "as given (optimizer.lr)"
    ratio = f"{resolved.batch.global_batch} / {optimizer.lr_reference_batch}"
    factor = f"√({ratio})" if optimizer.lr_scaling == "sqrt" else ratio
    scaling = f"{optimizer.lr_scaling} scaling from the batch it was tuned at"
    return f"= {lr_text(optimizer.lr)} × {factor}: {scaling}"


def _lr_course(resolved: Resolved) -> str:
    """Warmup and what follows it."""
    schedule, rate = resolved.config.schedule, resolved.learning_rate
    warmup = "no warmup"
    if rate.warmup_tokens:
        tokens = f"{count_text(rate.warmup_tokens)} tokens"
        steps = f"{rate.warmup_tokens / resolved.batch.global_batch_tokens:,.1f}".removesuffix(".0")
        warmup = f"warmup {tokens}" if resolved.course.growths else f"warmup {steps} steps ({tokens})"
    last = lr_text(rate.peak * schedule.min_lr_fraction)
    then = {
        "constant": "then constant",
        "cosine": f"then a cosine to {last}",
        "linear": f"then linear to {last}",
        "wsd": f"then constant, and linear to {last} over the last {schedule.decay_fraction:.0%}",
    }[schedule.kind]
    return f"{warmup}, {then}"


def _data(facts: StartFacts) -> str:
    config = facts.resolved.config
    wanted = facts.resolved.learning_rate.total_tokens
    sources = [_source(each) for each in facts.sources]
    passes = [f"{each.passes:.2f} passes over" for each in facts.sources]
    if len(sources) > 1:
        sources = [
            f"{each.share:.1%} of the samples, {passes} {text}"
            for each, passes, text in zip(facts.sources, passes, sources, strict=True)
        ]
    return "\n".join(
        [
            *sources,
            f"unigram entropy {facts.unigram_entropy:.3f} nats: the loss of knowing only frequencies",
            f"{config.run.steps:,} steps read {count_text(wanted)} tokens"
            + (f", {passes[0]} them" if len(sources) == 1 else ""),
        ]
    )


def _source(source: SourceFacts) -> str:
    left_out = f"; files left out, not UTF-8 text: {source.skipped_files:,}" if source.skipped_files else ""
    return (
        f"{source.documents:,} document{'s' * (source.documents != 1)}, {count_text(source.tokens)} tokens "
        f"from {source.path}{left_out}"
    )


def against(loss: float, entropy: float) -> str:
    """How far a loss is from the unigram entropy, in words; both in nats per token."""
    gap = entropy - loss
    return f"{abs(gap):.2f} nats {'below' if gap >= 0 else 'above'} the unigram entropy {entropy:.3f}"


def _verdict(losses: Sequence[float], entropy: float) -> Text:
    """The worst loss decides; one that is not a number is below nothing."""
    if all(entropy - loss >= WELL_BELOW_NATS for loss in losses):
        return Text("well below: the model reads context, not only frequencies", "green")
    if all(entropy - loss > 0 for loss in losses):
        return Text("only just below: barely more than frequencies is learnt yet", "yellow")
    return Text("not below: nothing beyond frequencies is learnt", "yellow")


def _commands(commands: Sequence[tuple[str, str]]) -> RenderableType:
    """A line to copy, and below it what it does."""
    text = Text()
    for index, (command, purpose) in enumerate(commands):
        text.append(("\n" if index else "") + command, "bold")
        text.append(f"\n  {purpose}", "dim")
    return text


def printable(text: str) -> str:
    """`text` with every character that could steer a terminal made visible: a model may write anything."""
    return "".join(
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}"
        for character in text.expandtabs(4)
    )
