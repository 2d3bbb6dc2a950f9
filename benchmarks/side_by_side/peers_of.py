"""The peers: transformers' Llama or Mixtral of the size, fused AdamW, under each system's own way to train."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from side_by_side.sizes import Size

Step = Callable[[], None]
LEARNING_RATE = 3e-4


def make(
    maker: str, size: Size, options: dict[str, Any], micro_batches: int, machine: dict[str, Any] | None
) -> Step:
    """A function that takes one optimizer step on this rank.

    Args:
        machine: Fivefold's resolved [machine] section, to give the peer the same settings; None: as it comes.
    """
    if machine is not None:
        from fivefold.config.tree import Machine
        from fivefold.trainer.machine import apply

        apply(Machine(**machine))
    torch.manual_seed(0)
    ddp_like = {
        "plain_loop": plain_loop,
        "ddp": ddp,
        "fsdp2": fsdp2,
        "accelerate": accelerate,
        "fabric": fabric,
    }
    if maker in ddp_like:
        return ddp_like[maker](size)
    if maker == "deepspeed":
        return deepspeed(size, options["stage"])
    if maker == "torch_pp":
        return torch_pp(size, micro_batches)
    return {"torch_tp": torch_tp, "tp_plan": tp_plan, "torch_2d": torch_2d}[maker](size)


def model_of(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    shape = {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": size.vocab,
        "max_position_embeddings": size.sequence,
        "use_cache": False,
    }
    if size.experts:
        own = {"num_local_experts": size.experts, "num_experts_per_tok": 2}
        return MixtralForCausalLM(MixtralConfig(intermediate_size=size.expert_ffn, **own, **shape)).train()
    return LlamaForCausalLM(LlamaConfig(intermediate_size=size.ffn, **shape)).train()


def rows(size: Size, seed: int, micro_batches: int = 1) -> Tensor:
    """Token ids `[micro_batches · micro_batch, sequence]`; the model shifts them to labels itself."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(size.vocab, (micro_batches * size.micro_batch, size.sequence), generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Step:
    """The loop everybody writes."""

    def step() -> None:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_loop(size: Size) -> Step:
    model = model_of(size)
    return plainly(model, adamw(model), rows(size, 0))


def ddp(size: Size) -> Step:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model_of(size))
    return plainly(model, adamw(model), rows(size, rank()))


def fsdp2(size: Size) -> Step:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = model_of(size)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return plainly(model, adamw(model), rows(size, rank()))


def accelerate(size: Size) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = model_of(size)
    model, optimizer = accelerator.prepare(model, adamw(model))
    batch = rows(size, rank())

    def step() -> None:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fabric(size: Size) -> Step:
    from lightning_fabric import Fabric

    # The variable by which Fabric sees that its ranks were started for it.
    os.environ["TORCHELASTIC_RUN_ID"] = "peers"
    started = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    started.launch()
    model = model_of(size)
    model, optimizer = started.setup(model, adamw(model))
    batch = rows(size, rank())

    def step() -> None:
        loss = model(input_ids=batch, labels=batch).loss
        started.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def deepspeed(size: Size, stage: int) -> Step:
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = model_of(size)
    settings = {
        "train_micro_batch_size_per_gpu": size.micro_batch,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)
    batch = rows(size, rank())

    def step() -> None:
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()

    return step


def torch_tp(size: Size) -> Step:
    """parallelize_module with the plan of torch's own Llama examples, without sequence parallel."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    model = model_of(size)
    _tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    return plainly(model, _per_kind(model), rows(size, 0))


def torch_2d(size: Size) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = model_of(size)
    _tensor_parallel(model, mesh["tp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return plainly(model, _per_kind(model), rows(size, mesh["dp"].get_local_rank()))


def _tensor_parallel(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    column, row = ColwiseParallel, RowwiseParallel
    for layer in model.model.layers:
        names = {
            "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
            "mlp": ("gate_proj", "up_proj", "down_proj"),
        }
        plan = {f"{block}.{name}": column() for block, found in names.items() for name in found[:-1]}
        plan |= {f"{block}.{found[-1]}": row() for block, found in names.items()}
        parallelize_module(layer, mesh, plan)
    ends = {
        "model.embed_tokens": row(input_layouts=Replicate()),
        "lm_head": column(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def _per_kind(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW refuses a group that mixes tensors of different meshes, so each kind has its own."""
    kinds: dict[str, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault(str(getattr(parameter, "device_mesh", None)), []).append(parameter)
    groups = [{"params": found} for found in kinds.values()]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)


def tp_plan(size: Size) -> Step:
    from transformers import AutoModelForCausalLM

    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp() if rank() == 0 else ""]
    dist.broadcast_object_list(box, src=0)
    if rank() == 0:
        model_of(size).save_pretrained(box[0])
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(box[0], tp_plan="auto", dtype=torch.float32).train()
    return plainly(model, _per_kind(model), rows(size, 0))


class Stage(nn.Module):
    """A contiguous part of transformers' Llama, which has no such cut itself."""

    def __init__(self, whole: nn.Module, first: bool) -> None:
        super().__init__()
        half = len(whole.model.layers) // 2
        self.first = first
        self.rotary = whole.model.rotary_emb
        self.layers = whole.model.layers[:half] if first else whole.model.layers[half:]
        self.embed = whole.model.embed_tokens if first else None
        self.norm, self.head = (None, None) if first else (whole.model.norm, whole.lm_head)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        turns = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=turns, attention_mask=None, position_ids=positions)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def torch_pp(size: Size, micro_batches: int) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    module = Stage(model_of(size), first=rank() == 0)
    stage = PipelineStage(module, rank(), 2, torch.device("cpu"))

    def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
        flat = logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(flat, tokens[:, 1:].flatten())

    schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss_of)
    optimizer = adamw(module)
    batch = rows(size, 0, micro_batches)

    def step() -> None:
        if rank() == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return step
