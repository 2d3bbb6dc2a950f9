"""Where a line of the ledger comes from: its formula, the numbers put in, its source."""

from fivefold.config.errors import BadInput, did_you_mean
from fivefold.ledger import activations, data, flops
from fivefold.ledger.pipeline import own_stages
from fivefold.ledger.shards import contents
from fivefold.ledger.total import Ledger

SOURCES = {
    "memory.parameters": "Rajbhandari 2020 (ZeRO) §5: what a rank keeps of each parameter, by stage",
    "memory.gradients": "Rajbhandari 2020 (ZeRO) §5; under a pipeline whole until the end of the step",
    "memory.optimizer": "Kingma & Ba 2015 (two moments), Loshchilov & Hutter 2019 (AdamW); "
    "split as in Rajbhandari 2020 (ZeRO) §5",
    "memory.activations": "Korthikanti 2022 table 2; torch's eager block as counted from autograd's storages "
    "(ledger/activations.py); in flight: the simulated schedule",
    "memory.buffers": "messages, gathered units, spare keys and values: ledger/total.py",
    "memory.overhead": "ledger/physics.py: context_bytes, fragmentation",
    "time.compute": "roofline per matmul (Williams 2009) and per streamed byte: ledger/roofline.py",
    "time.bubble": "the schedule's dependency graph, simulated: ledger/simulate.py",
    "time.optimizer": "bytes AdamW moves over the bandwidth streams reach",
    "time.exposed_communication": "α-β costs of the programs, less what compute hides: ledger/network.py",
    "flops.model": "PaLM appendix B: 3 × forward, causal attention",
    "flops.hardware": "model FLOPs and what is computed again",
}


def lines(ledger: Ledger) -> list[str]:
    """Names of the lines that can be explained."""
    return [*SOURCES, *(f"traffic.{r.axis}.{r.primitive}.{r.phase}" for r in ledger.traffic)]


def explain(ledger: Ledger, line: str) -> str:
    """Three lines: formula, numbers, source. Raises BadInput for an unknown line."""
    if line.startswith("traffic."):
        for row in ledger.traffic:
            if line == f"traffic.{row.axis}.{row.primitive}.{row.phase}":
                each = row.bytes_per_rank / max(row.times, 1)
                return (
                    f"{row.formula}; {row.times} times a step on the rank that is through last, {row.link}\n"
                    f"{row.times} × {each:,.0f} B = {row.bytes_per_rank:,.0f} B; on the wire "
                    f"{row.wire_bytes:,.0f} B; {row.seconds:.4g} s, of which {row.exposed_seconds:.4g} s exposed\n"
                    f"source: {_traffic_source(row.axis)}; α-β costs: Thakur 2005, Sanders 2009"
                )
    if line not in SOURCES:
        raise BadInput(f"--explain {line}: no such line; {did_you_mean(line, lines(ledger))}")
    return f"{_numbers(ledger, line)}\nsource: {SOURCES[line]}"


def _traffic_source(axis: str) -> str:
    """Where the volume of an axis' traffic is derived."""
    papers = {
        "tp": "Shoeybi 2019 §3 and Korthikanti 2022 §4.2.2",
        "cp": "Liu 2023 (ring attention) §3, Jacobs 2023 (Ulysses) §3",
        "ep": "Lepikhin 2020 (GShard) §2.2: dispatch and combine",
        "pp": "Narayanan 2021 §3.2",
        "embedding": "Narayanan 2021: gradients of tied ends",
    }
    return papers.get(axis, "Rajbhandari 2020 (ZeRO) §7")


def _numbers(ledger: Ledger, line: str) -> str:
    job, full, stack = ledger.job, ledger.fullest, ledger.job.stack
    section, _, name = line.partition(".")
    dense, expert = data.shard_degrees(job)
    share = full.share
    if name in ("parameters", "gradients", "optimizer"):
        each = {
            "parameters": stack.compute_copy or stack.master,
            "gradients": stack.gradient,
            "optimizer": stack.moments + (stack.master if stack.compute_copy else 0),
        }[name]
        value = getattr(full.memory, name)
        return (
            f"parameters of the rank · {each} B, split over dp_shard × cp = {dense} (experts {expert}) where "
            f"zero = {job.zero} says so\n({share.dense:,} dense + {share.expert:,} expert) · {each} B → "
            f"{value:,.0f} B"
        )
    if name == "activations":
        own = own_stages(job, full.rank)
        held = ledger.timeline.peak_in_flight[full.rank]
        content = [contents(job.model, job.stages, job.even_layers)[index] for index in own]
        count = sum(c.dense_layers + c.expert_layers for c in content)
        layer = activations.saved(job, bool(content[0].expert_layers))
        return (
            "saved bytes of the stages · micro-batches in flight, and one layer's recomputed activations\n"
            f"{count} layers · {layer:,.0f} B a micro-batch; {held:,.0f} B in flight at the fullest; "
            f"total {full.memory.activations:,.0f} B"
        )
    if section == "flops":
        forward = flops.forward_per_token(job.model, job.sequence_length, "causal")
        value = flops.model_flops(job) if name == "model" else flops.hardware_flops(job)
        return (
            "3 · (2 · active matmul parameters + attention + head) · tokens\n"
            f"3 · ({forward.layers:.4g} + {forward.core:.4g} + {forward.head:.4g}) · {job.step_tokens:,} tokens"
            f" → {value:.6g}"
        )
    group = ledger.time if section == "time" else full.memory
    return f"{line}\n{getattr(group, name):.6g} {'s' if section == 'time' else 'B'}"
