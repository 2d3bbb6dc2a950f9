"""Where a line of the ledger comes from: its formula, the numbers put in, its source."""

from fivefold.config.errors import BadInput, did_you_mean
from fivefold.ledger import activations, data, flops, muon, pipeline
from fivefold.ledger.network import wires
from fivefold.ledger.pipeline import own_stages
from fivefold.ledger.shards import contents
from fivefold.ledger.total import Ledger, optimizer_seconds, slowest
from fivefold.ledger.traffic import Row
from fivefold.render.units import seconds_text

SOURCES = {
    "memory.parameters": "Rajbhandari 2020 (ZeRO): what a rank keeps of each parameter, by stage",
    "memory.gradients": "Rajbhandari 2020 (ZeRO); under a pipeline whole until the end of the step",
    "memory.optimizer": "Kingma & Ba 2015 (two moments), Loshchilov & Hutter 2019 (AdamW); "
    "split as in Rajbhandari 2020 (ZeRO)",
    "memory.activations": "Korthikanti 2022 table 2; torch's eager block as counted from autograd's storages "
    "(ledger/activations.py); in flight: the simulated schedule",
    "memory.buffers": "messages, gathered units, spare keys and values: ledger/total.py",
    "memory.overhead": "ledger/physics.py: context_bytes, fragmentation",
    "time.compute": "roofline per matmul (Williams 2009) and per streamed byte: ledger/roofline.py",
    "time.bubble": "the schedule's dependency graph, simulated: ledger/simulate.py",
    "time.step": "the rank that is through last: ledger/total.py",
    "time.other": "ledger/physics.py: step, fitted to all rows of fivefold validate at once",
    "time.optimizer": "bytes AdamW moves over the bandwidth streams reach; roofline of Muon's products: ledger/muon.py",
    "time.exposed_communication": "α-β costs of the programs, less what compute hides: ledger/network.py",
    "flops.model": "3 × forward as PaLM (Chowdhery 2022) counts, attention causal",
    "flops.hardware": "model FLOPs and what is computed again",
    "flops.optimizer": "Jordan et al. 2024 (Muon): five iterations of Newton-Schulz a matrix",
    "rate.tokens_per_second_per_gpu": "ledger/total.py",
    "rate.mfu": "PaLM (Chowdhery 2022), attention counted causally",
    "rate.hfu": "as MFU, of what the devices execute",
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
                    f"{row.wire_bytes:,.0f} B; {_link(ledger, row)}; {row.seconds:.4g} s, of which "
                    f"{row.exposed_seconds:.4g} s exposed\n"
                    f"source: {_traffic_source(row)}; α-β costs: Thakur 2005, Sanders 2009"
                )
    if line not in SOURCES:
        raise BadInput(f"--explain {line}: no such line; {did_you_mean(line, lines(ledger))}")
    return f"{_numbers(ledger, line)}\nsource: {SOURCES[line]}"


def _link(ledger: Ledger, row: Row) -> str:
    if ledger.job.hardware.measured:
        return "seconds as measured, where a measurement fits"
    found = wires(ledger.job.hardware, ledger.job.physics)
    link = found.between if row.link == "between nodes" else found.inside
    return f"α = {seconds_text(link.latency)}, 1/β = {link.bandwidth / 1e9:.4g} GB/s"


def _traffic_source(row: Row) -> str:
    """Where the volume of a row is derived."""
    if row.primitive == "all_to_all" and row.phase == "optimizer":
        return "Jordan et al. 2024 (Muon): whole matrices; ledger/muon.py"
    papers = {
        "tp": "Shoeybi 2019 (Megatron-LM), with sequence parallel Korthikanti 2022",
        "cp": "Liu 2023 (ring attention), Jacobs 2023 (Ulysses)",
        "ep": "Lepikhin 2020 (GShard): dispatch and combine",
        "pp": "Narayanan 2021 (Megatron-LM on clusters)",
        "embedding": "Narayanan 2021: gradients of tied ends",
    }
    return papers.get(row.axis, "Rajbhandari 2020 (ZeRO)")


def _numbers(ledger: Ledger, line: str) -> str:
    """Two lines: the formula, and the numbers put in."""
    section, _, name = line.partition(".")
    if section == "flops":
        return _flops(ledger, name)
    if section == "time":
        return _time(ledger, name)
    if section == "rate":
        return _rate(ledger, name)
    if name in ("parameters", "gradients", "optimizer"):
        return _states(ledger, name)
    return {"activations": _activations, "buffers": _buffers, "overhead": _overhead}[name](ledger)


def _states(ledger: Ledger, name: str) -> str:
    job, full, stack = ledger.job, ledger.fullest, ledger.job.stack
    dense, expert = data.shard_degrees(job)
    each = {
        "parameters": stack.compute_copy or stack.master,
        "gradients": stack.gradient,
        "optimizer": stack.moments + (stack.master if stack.compute_copy else 0),
    }[name]
    share, value = full.share, getattr(full.memory, name)
    spared = stack.spared_moments if name == "optimizer" else 0
    matrices = f"; {spared} B less for what Muon orthogonalises" if spared else ""
    return (
        f"parameters of the rank · {each} B, split over dp_shard × cp = {dense} (experts {expert}) where "
        f"zero = {job.zero} says so{matrices}\n({share.dense:,} dense + {share.expert:,} expert) · {each} B → "
        f"{value:,.0f} B"
    )


def _activations(ledger: Ledger) -> str:
    job, full = ledger.job, ledger.fullest
    held = ledger.timeline.peak_in_flight[full.rank]
    content = [
        contents(job.model, job.stages, job.even_layers)[index] for index in own_stages(job, full.rank)
    ]
    count = sum(c.dense_layers + c.expert_layers for c in content)
    layer = activations.saved(job, bool(content[0].expert_layers))
    return (
        "saved bytes of the stages · micro-batches in flight, and one layer's recomputed activations\n"
        f"{count} layers · {layer:,.0f} B a micro-batch; {held:,.0f} B in flight at the fullest; "
        f"total {full.memory.activations:,.0f} B"
    )


def _buffers(ledger: Ledger) -> str:
    job, value = ledger.job, ledger.fullest.memory.buffers
    layer = activations.backward_buffers(job)
    messages = 4 * pipeline.message_bytes(job) if job.pp > 1 else 0.0
    return (
        "a layer's tensors in backward + four messages of a pipeline + spare keys and values, units gathered or "
        f"cast, gradients on their way\n{layer:,.0f} B + {messages:,.0f} B + {value - layer - messages:,.0f} B → "
        f"{value:,.0f} B"
    )


def _overhead(ledger: Ledger) -> str:
    memory, physics = ledger.fullest.memory, ledger.job.physics
    if ledger.job.hardware.device.is_cpu:
        return (
            "fragmentation · all that is allocated\n"
            f"{physics.fragmentation} · {memory.allocated:,.0f} B → {memory.overhead:,.0f} B"
        )
    return (
        "device context and communicators + fragmentation · (activations + buffers)\n"
        f"{physics.context_bytes:,.0f} B + {physics.fragmentation} · ({memory.activations:,.0f} + "
        f"{memory.buffers:,.0f}) B → {memory.overhead:,.0f} B"
    )


def _flops(ledger: Ledger, name: str) -> str:
    job = ledger.job
    forward = flops.forward_per_token(job.model, job.sequence_length, "causal")
    model, hardware = flops.model_flops(job), flops.hardware_flops(job)
    if name == "model":
        return (
            "3 · (2 · active matmul parameters of the layers + attention + head) · tokens\n"
            f"3 · ({forward.layers:.4g} + {forward.core:.4g} + {forward.head:.4g}) · {job.step_tokens:,} tokens"
            f" → {model:.6g}"
        )
    if name == "optimizer":
        return (
            "5 · (4 · rows² · columns + 2 · rows³) of each matrix of the layers, its shorter side for the rows, on "
            f"every replica that ZeRO does not split; 0 without Muon\nof all ranks → {muon.flops(job):.6g}"
        )
    return (
        f"model FLOPs + what recompute = {job.recompute} runs again, and the scores in {job.stack.attention} "
        f"attention's backward\n{model:.6g} + {(hardware - model) / job.step_tokens:.4g} · {job.step_tokens:,} "
        f"tokens → {hardware:.6g}"
    )


def _time(ledger: Ledger, name: str) -> str:
    job, time, line = ledger.job, ledger.time, ledger.timeline
    built = pipeline.stages(job, pipeline.costs(job))
    shares = pipeline.shares(job, built)
    _, rank, ending = slowest(job, built, line, shares)
    passes = optimizer_seconds(job, shares[rank])
    own = [built[index].times for index in own_stages(job, rank)]
    forward = sum(times.forward for times in own)
    backward = sum(times.input_grad + times.weight_grad for times in own)
    speed = job.hardware.device.bandwidth * job.physics.memory_rate
    inner = time.exposed_communication - ending.late
    parts = [value for part, value in time._asdict().items() if part != "step"]
    formula, numbers = {
        "step": (
            "compute + exposed communication + bubble + optimizer + other",
            " + ".join(f"{value:.4g}" for value in parts),
        ),
        "compute": (
            "micro-batches · (forward + backward) of the stages of the rank that is through last, less traffic in them",
            f"{job.microbatches} · ({forward:.4g} + {backward:.4g}) − {inner:.4g}",
        ),
        "bubble": (
            "end of the rank's last action, simulated, less its work",
            f"pipeline rank {rank} of {job.pp}, schedule {job.schedule}: {line.finished[rank]:.6g} − "
            f"{line.busy[rank]:.6g}",
        ),
        "optimizer": (
            "bytes AdamW reads and writes / (bandwidth · part of it that streams reach) + Muon's products on the rank "
            "with most of them, with its passes over bf16",
            f"{passes * speed:,.0f} B / ({job.hardware.device.bandwidth:.4g} B/s · {job.physics.memory_rate}) + "
            f"{ending.update - passes:.4g}",
        ),
        "exposed_communication": (
            "traffic inside micro-batches that waits + gradient and parameter traffic that nothing hides",
            f"{inner:.4g} + {ending.late:.4g}",
        ),
        "other": ("seconds of a step outside of all else: data, logging", "fitted constant"),
    }[name]
    return f"{formula}\n{numbers} → {getattr(time, name):.6g} s"


def _rate(ledger: Ledger, name: str) -> str:
    job, step = ledger.job, ledger.time.step
    if name == "tokens_per_second_per_gpu":
        return (
            "tokens of a step / step time / devices\n"
            f"{job.step_tokens:,} / {step:.6g} s / {job.world_size:,} → {ledger.tokens_per_second_per_gpu:.6g}"
        )
    hardware = name == "hfu"
    count = flops.hardware_flops(job) if hardware else flops.model_flops(job)
    kind = "hardware" if hardware else "model"
    return (
        f"{kind} FLOPs of a step / (step time · devices · dense peak of {job.precision})\n"
        f"{count:.6g} / ({step:.6g} s · {job.world_size:,} · {job.hardware.device.peak_of(job.precision):.4g}) → "
        f"{ledger.utilization('causal', hardware):.4f}"
    )
