"""The one description of a run: every section (the model's: model.py), every key, its type, legal values and help text.

Help on the command line, `fivefold config explain KEY` and docs/reference.md are all printed from here.
"""

from typing import Annotated, Literal

from msgspec import Meta

from fivefold.config.model import Model, Role
from fivefold.config.section import Section

Ranks = Annotated[int, Meta(le=1 << 20)]
Decay = Annotated[float, Meta(ge=0.0, lt=1.0)]


class Cluster(Section, frozen=True):
    """The cluster to plan for. Training itself does not read it."""

    preset: Annotated[str, Meta(description='Nodes, GPUs a node and kind, e.g. "16x8 h100".')] = ""
    path: Annotated[str, Meta(description="A cluster file, e.g. one written by calibration.")] = ""


class Parallel(Section, frozen=True):
    """The layout. Axes outermost first: pp, dp_replicate, dp_shard, cp, tp; ep re-uses dp_shard × cp."""

    pp: Annotated[Ranks, Meta(ge=-1, description="Pipeline-parallel degree.")] = 1
    dp_replicate: Annotated[
        Ranks, Meta(ge=-1, description="Data-parallel replicas that hold the same shards.")
    ] = 1
    dp_shard: Annotated[
        Ranks, Meta(ge=-1, description="Data-parallel ranks that `zero` splits state over; -1 = all left.")
    ] = -1
    cp: Annotated[Ranks, Meta(ge=-1, description="Context-parallel degree (splits the sequence).")] = 1
    tp: Annotated[Ranks, Meta(ge=-1, description="Tensor-parallel degree (innermost: inside a node).")] = 1
    ep: Annotated[
        Ranks, Meta(ge=1, description="Expert-parallel degree; takes no ranks, divides dp_shard × cp.")
    ] = 1
    zero: Annotated[
        Literal[0, 1, 2, 3],
        Meta(description="Split over dp_shard × cp: 0 nothing, 1 optimizer, 2 + gradients, 3 + parameters."),
    ] = 0
    sequence_parallel: Annotated[
        bool, Meta(description="Split activations between tensor-parallel regions along the sequence.")
    ] = False
    context: Annotated[
        Literal["ring", "ulysses"],
        Meta(description="Context parallel by ring attention or by all-to-all over heads."),
    ] = "ring"
    schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zbv", "dualpipev"],
        Meta(description="Pipeline schedule."),
    ] = "1f1b"
    chunks: Annotated[int, Meta(ge=1, description="Model chunks (stages) per pipeline rank.")] = 1
    recompute: Annotated[
        Literal["none", "attention", "elementwise", "full"],
        Meta(description="What backward recomputes (elementwise: matmul outputs are kept)."),
    ] = "none"
    backend: Annotated[
        Literal["default", "gloo", "shm", "nccl"],
        Meta(
            description="Collective backend; default = nccl on NVIDIA GPUs; on CPUs shm (shared memory within a "
            "host, gloo between hosts) where Linux runs on x86-64, else gloo."
        ),
    ] = "default"
    algorithm: Annotated[
        Literal["backend", "ring", "halving-doubling", "recursive-doubling", "double-tree", "hierarchical"],
        Meta(
            description="Collective algorithm of data parallel (gradient sums; with zero > 0 parameter gathers too): "
            "the backend's own, or a program of point-to-point messages, for which compute waits."
        ),
    ] = "backend"
    compression: Annotated[
        Literal["none", "bf16", "fp16", "int8", "topk", "threshold", "powersgd"],
        Meta(
            description="Compression of gradient sums over replicas, with error feedback: what is not sent is added "
            "to the next gradient."
        ),
    ] = "none"
    compression_density: Annotated[
        float, Meta(gt=0.0, le=1.0, description="topk: fraction of a bucket's elements that a rank sends.")
    ] = 0.01
    compression_threshold: Annotated[
        float,
        Meta(gt=0.0, description="threshold: elements of at least so many root mean squares are sent."),
    ] = 3.0
    compression_rank: Annotated[
        int, Meta(ge=1, description="powersgd: columns of the two factors a gradient matrix is sent as.")
    ] = 4


class BatchRamp(Section, frozen=True):
    """A global batch that grows at the beginning, by equal increments after equal numbers of tokens."""

    start: Annotated[
        int, Meta(ge=0, description="Global batch of the first steps, in sequences; 0 = no ramp.")
    ] = 0
    increment: Annotated[int, Meta(ge=0, description="Sequences added each time.")] = 0
    tokens: Annotated[
        int, Meta(ge=0, description="Tokens consumed until the batch reaches the global batch.")
    ] = 0


class Batch(Section, frozen=True):
    """Give the global batch and the micro-batch; accumulation is derived and printed with its reason."""

    global_batch: Annotated[
        int,
        Meta(
            ge=0, description="Sequences per optimizer step, over all ranks; 0 = one micro-batch a replica."
        ),
    ] = 0
    global_batch_tokens: Annotated[
        int, Meta(ge=0, description="The same in tokens: a multiple of sequence_length. Give one of the two.")
    ] = 0
    micro_batch: Annotated[
        int, Meta(ge=1, description="Sequences in one forward and backward of one replica.")
    ] = 1
    sequence_length: Annotated[int, Meta(ge=1, description="Tokens per sequence.")] = 512
    ramp: Annotated[BatchRamp, Meta(description="Growth of the batch at the beginning.")] = BatchRamp()


class Precision(Section, frozen=True):
    """Precision of the computation. Master weights and reductions are float32 (float64 under float64)."""

    dtype: Annotated[
        Literal["float64", "float32", "bf16", "fp16"],
        Meta(description="Compute dtype of forward and backward."),
    ] = "float32"
    max_skips: Annotated[
        int,
        Meta(ge=0, description="Steps in a row that may be skipped for a non-finite gradient before a stop."),
    ] = 10
    initial_loss_scale: Annotated[
        float, Meta(ge=1.0, description="fp16: the factor on the loss at the start of a run.")
    ] = 65536.0
    loss_scale_growth_steps: Annotated[
        int, Meta(ge=1, description="fp16: updates without an overflow after which the factor doubles.")
    ] = 2000
    min_loss_scale: Annotated[
        float, Meta(gt=0.0, description="fp16: the factor is halved by an overflow, but not below this.")
    ] = 1.0


class Optimizer(Section, frozen=True):
    """The update rule."""

    name: Annotated[
        Literal["adamw", "sgd", "muon"],
        Meta(
            description="AdamW (fused), SGD with momentum, or Muon: the layers' matrices by Muon (each as a whole, "
            "however it is sharded), the rest by AdamW, with one learning rate."
        ),
    ] = "adamw"
    lr: Annotated[float, Meta(gt=0.0, description="Peak learning rate at the reference batch.")] = 3e-4
    lr_scaling: Annotated[
        Literal["none", "linear", "sqrt"],
        Meta(description="How lr follows the batch: linear for SGD (Goyal 2017), sqrt for adaptive methods."),
    ] = "none"
    lr_reference_batch: Annotated[
        int, Meta(ge=0, description="Global batch, in sequences, that `lr` was tuned at; 0 = this run's.")
    ] = 0
    betas: Annotated[tuple[Decay, Decay], Meta(description="AdamW's decay rates.")] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0.0, description="AdamW's denominator offset.")] = 1e-8
    momentum: Annotated[
        float, Meta(ge=0.0, lt=1.0, description="SGD's and Muon's momentum (Muon's usual: 0.95).")
    ] = 0.9
    weight_decay: Annotated[float, Meta(ge=0.0, description="Decoupled weight decay.")] = 0.1
    no_decay: Annotated[
        tuple[Role, ...], Meta(description="Roles of parameters without decay (see `spec.parameters`).")
    ] = ("norm", "bias", "embedding")
    clip: Annotated[
        float, Meta(ge=0.0, description="Largest norm of the whole gradient (clipping); 0 = no clipping.")
    ] = 1.0


class Schedule(Section, frozen=True):
    """Learning rate as a function of consumed tokens."""

    kind: Annotated[
        Literal["constant", "cosine", "linear", "wsd"],
        Meta(description="Shape after warmup; wsd = warmup, stable, decay."),
    ] = "cosine"
    warmup_tokens: Annotated[int, Meta(ge=0, description="Linear warmup, in tokens; never rescaled.")] = 0
    warmup_steps: Annotated[
        int,
        Meta(ge=0, description="Linear warmup, in steps at the reference batch B_ref: steps·B_ref/B here."),
    ] = 0
    decay_fraction: Annotated[
        float, Meta(gt=0.0, le=1.0, description="wsd: fraction of the run, at its end, in which lr decays.")
    ] = 0.2
    min_lr_fraction: Annotated[
        float, Meta(ge=0.0, le=1.0, description="Final learning rate as a fraction of the peak.")
    ] = 0.1


class Source(Section, frozen=True):
    """One of several sources of data."""

    path: Annotated[str, Meta(min_length=1)]
    weight: Annotated[float, Meta(gt=0.0)] = 1.0
    text_field: Annotated[str, Meta(min_length=1)] = "text"
    answers_only: bool = False


class Data(Section, frozen=True):
    """Where text comes from. Tokenized once into memory-mapped shards that later runs re-use."""

    path: Annotated[
        str,
        Meta(
            min_length=1,
            description="A file or a directory of text, .jsonl, .parquet, or token ids (.npy, .uint16.bin, "
            '.uint32.bin), told apart by suffix; or "python:stdlib" (this Python\'s own source).',
        ),
    ] = "python:stdlib"
    text_field: Annotated[
        str, Meta(min_length=1, description="Field (column) that holds a document in .jsonl and .parquet.")
    ] = "text"
    answers_only: Annotated[
        bool,
        Meta(
            description="Conversations in .jsonl or .parquet (prompt and response, or messages): loss on the "
            "answers only; none is cut by the end of a sample unless it is longer than one."
        ),
    ] = False
    sources: Annotated[
        tuple[Source, ...],
        Meta(
            description="A mixture instead of one path: each source by its weight, its share of the samples "
            "in proportion to the sum of weights."
        ),
    ] = ()
    tokenizer: Annotated[
        str,
        Meta(
            description="A tokenizer.json; empty = that of model.path, else a byte-pair tokenizer of model.vocab "
            "is trained on the data."
        ),
    ] = ""
    cache_dir: Annotated[
        str,
        Meta(min_length=1, description="Directory of tokenizers and token shards, shared by all ranks."),
    ] = "runs/data"
    document_mask: Annotated[
        bool,
        Meta(description="Attention and predictions do not cross the boundaries of packed documents."),
    ] = True
    validation_fraction: Annotated[
        float, Meta(ge=0.0, lt=1.0, description="Fraction of the samples held out for evaluation.")
    ] = 0.01


class Run(Section, frozen=True):
    """One run: how long, where, from which seed, on how many local ranks."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^([^./\\][^/\\]*)?$",
            title="text without a slash in it or a dot in front",
            description="Name of the run; empty = name of the config file.",
        ),
    ] = ""
    dir: Annotated[
        str, Meta(description="Run directory; empty = runs/NAME, or runs/NAME-2 … if that holds a run.")
    ] = ""
    steps: Annotated[int, Meta(ge=1, description="Optimizer steps.")] = 100
    seed: Annotated[int, Meta(ge=0, description="Seed of weights, data order and dropout.")] = 0
    ranks: Annotated[
        Ranks,
        Meta(ge=0, description="Local ranks to start; 0 = what the layout needs. Ignored under a launcher."),
    ] = 0
    eval_every: Annotated[int, Meta(ge=0, description="Steps between evaluations; 0 = only at the end.")] = 0
    eval_batches: Annotated[
        int, Meta(ge=1, description="Global batches of held-out samples per evaluation, at most.")
    ] = 4
    sample_tokens: Annotated[
        int, Meta(ge=0, description="Tokens of sample text written at the end of the run; 0 = none.")
    ] = 0
    timeout_seconds: Annotated[
        float, Meta(gt=0.0, le=1e7, description="A collective that takes longer is an error.")
    ] = 300.0


class Checkpoint(Section, frozen=True):
    """Saved state: model, optimizer, schedule, sample counter, config. Loads into any layout."""

    every: Annotated[int, Meta(ge=0, description="Steps between checkpoints; 0 = only at the end.")] = 0
    keep_last: Annotated[int, Meta(ge=1, description="Newest checkpoints kept.")] = 2
    keep_every: Annotated[
        int, Meta(ge=0, description="Steps whose multiples are kept for good; 0 = none.")
    ] = 0
    asynchronous: Annotated[bool, Meta(description="Write while training goes on.")] = True


class Log(Section, frozen=True):
    """What is shown and recorded. metrics.jsonl is always written."""

    every: Annotated[int, Meta(ge=1, description="Steps between printed lines when not on a terminal.")] = 10
    sinks: Annotated[
        tuple[Literal["tensorboard", "wandb"], ...], Meta(description="Further metric sinks (extras).")
    ] = ()


class Machine(Section, frozen=True):
    """Machine settings. Those measured (rank 0, first start) are written into the run's config and reused."""

    matmul: Annotated[
        Literal["measure", "highest", "high", "medium"],
        Meta(
            description="float32 matmul precision handed to torch; measure = fastest with float32's error. On NVIDIA "
            "GPUs high and medium are TF32."
        ),
    ] = "measure"
    malloc: Annotated[
        Literal["measure", "default", "keep"],
        Meta(description="keep = glibc keeps freed activations instead of returning them to the kernel."),
    ] = "measure"
    compile: Annotated[
        bool,
        Meta(
            description="torch.compile for the elementwise operations between a layer's products, in training; needs a "
            "C++ compiler."
        ),
    ] = False
    cudnn_autotune: Annotated[
        bool, Meta(description="On NVIDIA GPUs cuDNN times its algorithms at the first call of each shape.")
    ] = False
    peak_flops: Annotated[
        float, Meta(ge=0.0, description="Peak FLOP/s of one rank, the denominator of MFU; 0 = measure.")
    ] = 0.0


class Config(Section, frozen=True):
    """One training run, described once."""

    model: Model = Model()
    cluster: Cluster = Cluster()
    parallel: Parallel = Parallel()
    batch: Batch = Batch()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    data: Data = Data()
    run: Run = Run()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    machine: Machine = Machine()
