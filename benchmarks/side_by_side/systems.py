"""Who takes part, with how many ranks, and who is compared with whom."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class System:
    """One system in one layout.

    Attributes:
        name: of the system.
        layout: what it is asked to do, for people; with the name it is unique.
        maker: the function of `peers_of.py` (or "fivefold") that builds it.
        options: handed to the maker: for Fivefold, keys of [parallel].
        micro_batches: of one step of one replica.
    """

    name: str
    layout: str
    maker: str
    ranks: int
    options: dict[str, int | str | bool] = field(default_factory=dict)
    replicas: int = 1
    micro_batches: int = 1

    @property
    def key(self) -> str:
        return f"{self.name} {self.layout}"


def _fivefold(
    layout: str, ranks: int, replicas: int = 1, micro_batches: int = 1, **options: int | str | bool
) -> System:
    return System("fivefold", layout, "fivefold", ranks, options, replicas, micro_batches)


LOOP = System("transformers", "1 rank", "plain_loop", 1)
ONE = _fivefold("1 rank", 1)
DDP = System("torch DDP", "dp 2", "ddp", 2, replicas=2)
FSDP2 = System("torch FSDP2", "zero 3", "fsdp2", 2, replicas=2)
ACCELERATE = System("accelerate", "dp 2", "accelerate", 2, replicas=2)
FABRIC = System("Lightning Fabric", "dp 2", "fabric", 2, replicas=2)
DEEPSPEED = {z: System("DeepSpeed", f"zero {z}", "deepspeed", 2, {"stage": z}, 2) for z in (1, 2, 3)}
ZERO = {z: _fivefold(f"zero {z}", 2, 2, zero=z) for z in (0, 1, 2, 3)}
TORCH_TP = System("torch TP", "tp 2", "torch_tp", 2)
TP_PLAN = System("transformers tp_plan", "tp 2", "tp_plan", 2)
TP = _fivefold("tp 2", 2, tp=2)
TORCH_PP = System("torch 1F1B", "pp 2", "torch_pp", 2, micro_batches=4)
PP = [
    _fivefold("pp 2, 1f1b", 2, micro_batches=4, pp=2, schedule="1f1b"),
    _fivefold("pp 2, zbv", 2, micro_batches=4, pp=2, schedule="zbv", chunks=2),
]
CP = [
    _fivefold("cp 2, ring", 2, cp=2, context="ring"),
    _fivefold("cp 2, ulysses", 2, cp=2, context="ulysses"),
]
EP = _fivefold("ep 2", 2, 2, ep=2, zero=1)
TORCH_2D = System("torch FSDP2 x TP", "dp 2, tp 2", "torch_2d", 4, replicas=2)
DP_TP = _fivefold("dp 2, tp 2", 4, 2, tp=2)


@dataclass(frozen=True, slots=True)
class Bar:
    """`ours` must reach `factor` times the best of `theirs`, in tokens/s of the same group."""

    ours: tuple[System, ...]
    theirs: tuple[System, ...]
    factors: dict[str, float]  # by size


@dataclass(frozen=True, slots=True)
class Group:
    """Systems that are alive together and step in turn: few enough for the memory of this machine."""

    name: str
    systems: tuple[System, ...]
    bars: tuple[Bar, ...]

    def bars_of(self, size: str) -> list[Bar]:
        return [bar for bar in self.bars if size in bar.factors]


def _dense(s1: float, s2: float) -> dict[str, float]:
    return {"S1": s1, "S2": s2}


GROUPS = (
    Group("one rank", (LOOP, ONE), (Bar((ONE,), (LOOP,), {"S1": 2.0, "S2": 1.7, "MoE": 1.8}),)),
    Group(
        "replicas",
        (LOOP, ONE, DDP, ACCELERATE, FABRIC, ZERO[0]),
        (
            Bar((ZERO[0],), (DDP, ACCELERATE, FABRIC), _dense(1.9, 1.6)),
            Bar((ZERO[0],), (ONE,), _dense(2 * 0.93, 2 * 0.93)),
        ),
    ),
    Group(
        "zero 1, 2",
        (LOOP, *(DEEPSPEED[z] for z in (1, 2)), *(ZERO[z] for z in (1, 2))),
        tuple(Bar((ZERO[z],), (DEEPSPEED[z],), _dense(1.9, 1.6)) for z in (1, 2)),
    ),
    Group(
        "zero 3",
        (LOOP, ONE, FSDP2, DEEPSPEED[3], ZERO[3]),
        (
            Bar((ZERO[3],), (FSDP2, DEEPSPEED[3]), _dense(1.7, 1.5)),
            Bar((ZERO[3],), (ONE,), _dense(2 * 0.85, 2 * 0.85)),
        ),
    ),
    Group("tensor", (LOOP, TORCH_TP, TP_PLAN, TP), (Bar((TP,), (LOOP,), {"S1": 2.4}),)),
    Group("pipeline", (LOOP, TORCH_PP, *PP), (Bar(tuple(PP), (LOOP,), {"S1": 2.8}),)),
    Group("context", (LOOP, *CP), (Bar(tuple(CP), (LOOP,), {"S1": 2.4}),)),
    Group("data x tensor", (LOOP, TORCH_2D, DP_TP), (Bar((DP_TP,), (LOOP,), {"S1": 2.2}),)),
    Group("expert", (LOOP, DDP, ZERO[0], EP), (Bar((EP,), (DDP,), {"MoE": 1.6}),)),
)
_S1 = ("S1", "tiny")
ONLY = {"expert": ("MoE",), "tensor": _S1, "pipeline": _S1, "context": _S1, "data x tensor": _S1}
"""Groups for some sizes only."""
