"""One training step to be estimated: a model, a cluster, a layout, a batch and what the software does."""

from dataclasses import dataclass, field
from typing import Literal

from fivefold.config.model import Model
from fivefold.ledger.compression import UNCOMPRESSED, Compression
from fivefold.ledger.hardware import Hardware
from fivefold.ledger.network import Wires, wires
from fivefold.ledger.physics import Physics
from fivefold.spec import schedules
from fivefold.spec.mesh import ranks_of_a_host
from fivefold.spec.synchronisation import Algorithm

Recompute = Literal["none", "attention", "elementwise", "full"]
Attention = Literal["unfused", "flash", "fused", "blocked"]


@dataclass(frozen=True, slots=True)
class Stack:
    """What a software stack does, as far as bytes and seconds depend on it; declared, never fitted.

    Attributes:
        attention: scores in memory; FlashAttention-2; the vendor's newest kernel (cuDNN, FA3); or blocks of
            queries that keep their probabilities (nn/causal_attention.py, CPUs).
        fused: norms and activations are one kernel each and save only their inputs.
        manual_backward: eager, but norms, SwiGLU and rotary keep only their inputs (nn/manual_backward.py,
            and compiled nn/chain.py).
        compiled: elementwise chains between matmuls are one kernel (torch.compile).
        dropout: masks are kept (1 byte an element).
        compiled_chains: nn/chain.py is compiled: in a layer's sums with the residual stream keys are kept in place of
            masks (8 bytes a token), and backward makes the masks again; of rotary's tables each layer keeps a cast.
        compute_copy: bytes of the parameters that matmuls read, besides the master copy; 0 = the same.
        shard_apart: zero 1 and 2 gather parameters into a copy beside the shard that is updated, in the dtype
            they are gathered in (parallel/bucket.py).
        master: bytes of a parameter the optimizer updates.
        gather: bytes of a parameter on the wire, where parameters are gathered.
        gradient: bytes of an accumulated gradient.
        reduce: bytes of a gradient on the wire.
        moments: bytes of optimizer moments per parameter.
        muon: the layers' matrices are updated by Muon, which keeps half of the moments (trainer/muon.py).
        overlap_gradients, overlap_parameters: traffic of the data-parallel axes overlaps compute.
        overlap_tensor: tensor-parallel traffic runs under matmuls (user buffers, async TP).
        overlap_tensor_backward: only the backward's tensor-parallel traffic does (Megatron: under dgrad, wgrad).
        overlap_pipeline: messages between stages run under compute.
        overlap_experts: expert all-to-alls run under another micro-batch's matmuls (DualPipe; Megatron's 1F1B with
            its all-to-all overlapped).
        fused_softmax: stored scores need batch · heads divisible by this for the one-kernel softmax (Megatron's
            fused kernel: 4); otherwise, and always where it is 0 (eager torch), scale, mask, upcast, softmax and
            downcast are a pass each.
        fused_loss: cross-entropy is one kernel.
        loss_bytes: peak bytes per logit in the loss: 6 where softmax and gradient are computed in place of one
            float32 copy (Megatron), 14 in eager torch (cast, log-softmax, two gradients), 12 compiled.
        chunked_loss: a few million logits exist at a time, and their gradients are computed in the forward
            (nn/loss.py): kept are the gradients of the head's input and weight.
        returns_logits: the pipeline's last stage keeps the logits of all micro-batches and joins them at the
            end of the step (torch's schedules unless asked for losses only).
        keep_every: with "elementwise" recompute every n-th matmul's output is kept (torchtitan's per-op
            mode: 2).
        early_stop: full recompute of a layer stops before its last matmul, whose output backward does not need
            (torch's non-reentrant checkpoint).
        keep_gathered: sequence parallel keeps the gathered inputs of its matmuls, not their shards.
        reruns_traffic: communication repeated by recomputation has traffic rows of its own, not only seconds.
        sums_in_part: the all-reduce of gradients that tensor-parallel ranks compute in part (norms, routers,
            replicated KV heads) has a traffic row.
        ring_gradient: bytes of a gradient of keys and values on the ring; 0 = as an activation.
        dispatch_once: a token crosses the network once to each node, and goes once to each rank, that holds some of
            its experts, permuted in the same kernel (DeepEP, HybridEP); otherwise once per expert.
        bucket_bytes: flat buffers that gradients and parameters pass through on the wire (DeepSpeed: two of 5e8
            elements).
        graphs: kernels are launched as recorded graphs, not one by one by the host.
        scatter_messages: pipeline messages are split over tp even without sequence parallel.
        corrects_momentum: sparse compression keeps, of what it compresses, the momentum that the optimizer then does
            not.
        compression: how gradients are summed over replicas.
        algorithm: what carries out the collectives of the data-parallel axes.
        backend: what carries out all others.
    """

    attention: Attention = "flash"
    fused: bool = False
    manual_backward: bool = False
    compiled: bool = False
    dropout: bool = False
    compiled_chains: bool = False
    compute_copy: int = 2
    shard_apart: bool = False
    master: int = 4
    gather: int = 2
    gradient: int = 4
    reduce: int = 4
    moments: int = 8
    muon: bool = False
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    overlap_tensor: bool = False
    overlap_tensor_backward: bool = False
    overlap_experts: bool = False
    overlap_pipeline: bool = True
    fused_softmax: int = 1
    fused_loss: bool = False
    loss_bytes: float = 14.0
    chunked_loss: bool = False
    returns_logits: bool = False
    keep_every: int = 1
    early_stop: bool = False
    keep_gathered: bool = False
    reruns_traffic: bool = False
    sums_in_part: bool = False
    ring_gradient: int = 0
    dispatch_once: bool = False
    bucket_bytes: float = 0.0
    graphs: bool = False
    scatter_messages: bool = False
    corrects_momentum: bool = False
    compression: Compression = UNCOMPRESSED
    algorithm: Algorithm = "backend"
    backend: str = "nccl"

    @property
    def spared_moments(self) -> int:
        """Bytes of `moments` that Muon does not keep for an element of a matrix."""
        return self.moments // 2 if self.muon else 0


@dataclass(frozen=True, slots=True)
class Job:
    """All a ledger follows from. Degrees as in `spec.mesh`; `microbatches` per replica and step.

    `expert_tp` splits each expert's width; by default as tp, 1 where expert ranks re-use the tp ranks too.
    `even_layers` splits stages by counting layers only; `head_split` spreads the head over that many pipeline
    ranks (vocabulary parallel over pp). `imbalance` is the busiest expert rank's load over the mean.
    """

    model: Model
    hardware: Hardware
    micro_batch: int
    microbatches: int
    sequence_length: int
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    expert_tp: int = 0
    zero: int = 0
    sequence_parallel: bool = False
    context: Literal["ring", "ulysses"] = "ring"
    schedule: schedules.Name = "1f1b"
    chunks: int = 1
    recompute: Recompute = "none"
    precision: str = "bf16"  # of matmuls: bf16, fp16, fp8, fp4, float32, float64
    itemsize: int = 2  # bytes of an activation
    stack: Stack = field(default_factory=Stack)
    physics: Physics = field(default_factory=Physics)
    imbalance: float = 1.0
    even_layers: bool = False
    head_split: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def wires(self) -> Wires:
        """What a rank's messages travel on."""
        return wires(self.hardware, self.physics, self.stack.backend)

    @property
    def data_parallel(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def stages(self) -> int:
        return self.pp * schedules.chunks_of(self.schedule, self.chunks)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one context-parallel rank (the fullest)."""
        return self.micro_batch * -(-self.sequence_length // self.cp)

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.micro_batch * self.microbatches * self.data_parallel * self.sequence_length

    @property
    def expert_width_split(self) -> int:
        return self.expert_tp or self.tp

    @property
    def sequence_split(self) -> int:
        """What sequence parallel divides activations between tensor-parallel regions by."""
        return self.tp if self.sequence_parallel else 1

    def group(self, *axes: str) -> tuple[int, int]:
        """(ranks inside a fast domain, domains) of the group along neighbouring axes."""
        inner_to_outer = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
        stride, size = 1, 1
        for axis in inner_to_outer:
            degree = int(getattr(self, axis))
            if axis in axes:
                size *= degree
            elif size == 1:
                stride *= degree
        return self.spread(size, stride)

    def expert_group(self) -> tuple[int, int]:
        """As `group`, for the ranks experts are dealt over."""
        return self.spread(self.ep, self.expert_width_split)

    def spread(self, size: int, stride: int) -> tuple[int, int]:
        """(ranks inside a fast domain, domains) of `size` ranks that lie `stride` apart."""
        local = ranks_of_a_host(size, stride, self.hardware.fast_domain)
        return local, size // local
