"""Where a line of the ledger comes from: its formula, the numbers put in, its source.

The second line of an explanation is arithmetic: what stands before "→", worked out, is what stands behind it (a test
does it, on every line of many layouts).
"""

from fivefold.config.errors import BadInput, did_you_mean
from fivefold.ledger import data, flops, muon, pipeline
from fivefold.ledger.compression import kept_bytes
from fivefold.ledger.pipeline import Stage, own_stages
from fivefold.ledger.total import Ledger, buffers, optimizer_seconds, slowest, update_bytes
from fivefold.planner import explain_traffic
from fivefold.planner.explain_traffic import plain
from fivefold.spec.stages import layer_costs

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
    return [*SOURCES, *explain_traffic.names(ledger)]


def explain(ledger: Ledger, line: str) -> str:
    """Three lines: formula, numbers, source. Raises BadInput for an unknown line."""
    if line in (rows := explain_traffic.names(ledger)):
        return explain_traffic.text(ledger, ledger.traffic[rows.index(line)])
    if line not in SOURCES:
        raise BadInput(f"--explain {line}: no such line; {did_you_mean(line, lines(ledger))}")
    return f"{_numbers(ledger, line)}\nsource: {SOURCES[line]}"


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
    job, full = ledger.job, ledger.fullest
    dense, expert = data.shard_degrees(job)
    whole = pipeline.rank_share(job, pipeline.stages(job, pipeline.costs(job)), full.rank)
    spared = job.stack.spared_moments if name == "optimizer" else 0
    held = data.kept_elements(job, full.share) if name == "optimizer" else (0, 0)
    each = kept_bytes(job.stack.reduce, job.stack.corrects_momentum)
    terms = []
    for padded, real, matrices, kept, degree in (
        (full.share.dense, whole.dense, full.share.matrices, held[0], dense),
        (full.share.expert, whole.expert, full.share.expert_matrices, held[1], expert),
    ):
        split, stays = getattr(data.rates(job, degree), name)
        if padded and split:
            terms.append(f"+ {split} B · {_share(padded, degree)}")
        if padded and stays:
            terms.append(f"+ {stays} B · {real if name == 'gradients' else padded:,}")
        if matrices and spared:
            terms.append(f"− {spared} B · {_share(matrices, degree if job.zero else 1)}")
        if kept:
            terms.append(f"+ {each} B · {_share(kept, degree if job.zero else 1)}")
    experts = f" (experts {expert})" if full.share.expert else ""
    less = ", less the moments that Muon spares" if spared else ""
    less += ", and what compression keeps" if any(held) else ""
    return (
        f"bytes an element · parameters of the rank, split over dp_shard × cp = {dense}{experts} where "
        f"zero = {job.zero} says so{less}\n{' '.join(terms).removeprefix('+ ') or '0 B'} → "
        f"{plain(getattr(full.memory, name))} B"
    )


def _share(elements: int, degree: int) -> str:
    return f"⌈{elements:,} / {degree}⌉" if degree > 1 else f"{elements:,}"


def _activations(ledger: Ledger) -> str:
    job, full = ledger.job, ledger.fullest
    cost = pipeline.costs(job)
    built = pipeline.stages(job, cost)
    held = ledger.timeline.peak_in_flight[full.rank]
    own = [built[index] for index in own_stages(job, full.rank)]
    at_end = full.memory.activations - held - cost.live
    if len(own) == 1:
        in_flight = f"{plain(held / own[0].saved)} · ({_saved(own[0], cost)})"
        what = "micro-batches in flight · (saved bytes of the stage's layers + of its ends)"
    else:
        each = " or ".join(sorted({plain(stage.saved) for stage in own}))
        in_flight = plain(held)
        what = f"bytes in flight at the fullest (simulated; a micro-batch of a stage saves {each} B)"
    return (
        f"{what} + what recomputation brings back of a layer + the loss' live chunk\n"
        f"{in_flight} + {plain(cost.live)} + {plain(at_end)} → {plain(full.memory.activations)} B"
    )


def _saved(stage: Stage, cost: pipeline.Costs) -> str:
    content = stage.content
    terms = [
        f"{count} · {plain(each)}"
        for count, each in (
            (content.dense_layers, cost.saved_dense),
            (content.expert_layers, cost.saved_expert),
        )
        if count
    ]
    layers = content.dense_layers * cost.saved_dense + content.expert_layers * cost.saved_expert
    return " + ".join([*terms, plain(stage.saved - layers)])


def _buffers(ledger: Ledger) -> str:
    memory, parts = ledger.fullest.memory, buffers(ledger.job)
    if memory.buffers > sum(parts.values()) * (1 + 1e-12):
        update = muon.update_bytes(ledger.job, ledger.fullest.share)
        return (
            "what Muon's update holds, less activations, which are gone by then\n"
            f"{plain(update)} − {plain(memory.activations)} → {plain(memory.buffers)} B"
        )
    numbers = " + ".join(map(plain, parts.values()))
    return f"{' + '.join(parts)}\n{numbers} → {plain(memory.buffers)} B"


def _overhead(ledger: Ledger) -> str:
    memory, physics = ledger.fullest.memory, ledger.job.physics
    if ledger.job.hardware.device.is_cpu:
        return (
            "fragmentation · all that is allocated\n"
            f"{physics.fragmentation} · {plain(memory.allocated)} → {plain(memory.overhead)} B"
        )
    return (
        "device context and communicators + fragmentation · (activations + buffers)\n"
        f"{plain(physics.context_bytes)} + {physics.fragmentation} · ({plain(memory.activations)} + "
        f"{plain(memory.buffers)}) → {plain(memory.overhead)} B"
    )


def _flops(ledger: Ledger, name: str) -> str:
    job = ledger.job
    model, tokens = job.model, f"{job.step_tokens:,}"
    total = flops.model_flops(job)
    if name == "model":
        core = flops.forward_per_token(model, job.sequence_length, "causal").core
        return (
            "3 · (2 · active matmul parameters of the layers + attention of a token + 2 · vocabulary · hidden) "
            "· tokens\n"
            f"3 · (2 · {sum(layer_costs(model)):,} + {plain(core)} + 2 · {model.vocab:,} · {model.hidden:,}) · {tokens}"
            f" → {plain(total)}"
        )
    if name == "optimizer":
        return (
            "5 · (4 · rows² · columns + 2 · rows³) of each matrix of the layers, its shorter side for the rows, on "
            f"every replica that ZeRO does not split; 0 without Muon; of all ranks\n{plain(muon.flops(job))} → "
            f"{plain(muon.flops(job))}"
        )
    layers, core, scores = flops.repeated(job)
    return (
        f"model FLOPs + (matmuls and attention that recompute = {job.recompute} runs again + scores again in "
        f"{job.stack.attention} attention's backward) · tokens\n{plain(total)} + ({plain(layers)} + {plain(core)} + "
        f"{plain(scores)}) · {tokens} → {plain(flops.hardware_flops(job))}"
    )


def _time(ledger: Ledger, name: str) -> str:
    job, time, line = ledger.job, ledger.time, ledger.timeline
    built = pipeline.stages(job, pipeline.costs(job))
    shares = pipeline.shares(job, built)
    _, rank, ending = slowest(job, built, line, shares)
    own = [built[index].times for index in own_stages(job, rank)]
    forward = sum(times.forward for times in own)
    backward = sum(times.input_grad + times.weight_grad for times in own)
    inner = time.exposed_communication - ending.late
    parts = [value for part, value in time._asdict().items() if part != "step"]
    formula, numbers = {
        "step": (
            "compute + exposed communication + bubble + optimizer + other",
            " + ".join(map(plain, parts)),
        ),
        "compute": (
            "micro-batches · (forward + backward) of the stages of the rank that is through last, less traffic in them",
            f"{job.microbatches} · ({plain(forward)} + {plain(backward)}) − {plain(inner)}",
        ),
        "bubble": (
            f"end of the last action of pipeline rank {rank} of {job.pp}, {job.schedule} simulated, less its work",
            f"{plain(line.finished[rank])} − {plain(line.busy[rank])}",
        ),
        "optimizer": (
            "(bytes of an element's update · elements of the rank + bytes at which streams reach half their rate) / "
            "(bandwidth · part of it that streams reach)"
            + (
                " + Muon's products on the rank with most, with its passes over bf16"
                if job.stack.muon
                else ""
            ),
            _update(ledger, rank, ending.update - optimizer_seconds(job, shares[rank])),
        ),
        "exposed_communication": (
            "traffic inside micro-batches that waits + gradient and parameter traffic that nothing hides",
            f"{plain(inner)} + {plain(ending.late)}",
        ),
        "other": ("seconds of a step outside of all else: data, logging; fitted", plain(job.physics.step)),
    }[name]
    return f"{formula}\n{numbers} → {plain(getattr(time, name))} s"


def _update(ledger: Ledger, rank: int, products: float) -> str:
    job, share = ledger.job, ledger.ranks[rank].share
    dense, expert = data.shard_degrees(job) if job.zero else (1, 1)
    each, spared = update_bytes(job), 2 * job.stack.spared_moments
    terms = []
    for sign, size, counts in (
        ("+", each, (share.dense, share.expert)),
        ("−", spared, (share.matrices, share.expert_matrices)),
    ):
        owned = " + ".join(
            f"{count:,}" + (f" / {degree}" if degree > 1 else "")
            for count, degree in zip(counts, (dense, expert), strict=True)
            if count
        )
        if size and owned:
            terms.append(f"{sign} {size} · ({owned})")
    device, physics = job.hardware.device, job.physics
    start = "" if device.is_cpu else f" + {plain(physics.small_read)}"
    passes = (
        f"({' '.join(terms).removeprefix('+ ')}{start}) / ({plain(device.bandwidth)} · {physics.memory_rate})"
    )
    return passes + (f" + {plain(products)}" if job.stack.muon else "")


def _rate(ledger: Ledger, name: str) -> str:
    job, step = ledger.job, ledger.time.step
    if name == "tokens_per_second_per_gpu":
        return (
            "tokens of a step / step time / devices\n"
            f"{job.step_tokens:,} / {plain(step)} / {job.world_size:,} → {plain(ledger.tokens_per_second_per_gpu)}"
        )
    hardware = name == "hfu"
    count = flops.hardware_flops(job) if hardware else flops.model_flops(job)
    kind = "hardware" if hardware else "model"
    return (
        f"{kind} FLOPs of a step / (step time · devices · dense peak of {job.precision})\n"
        f"{plain(count)} / ({plain(step)} · {job.world_size:,} · {plain(job.hardware.device.peak_of(job.precision))})"
        f" → {plain(ledger.utilization('causal', hardware))}"
    )
