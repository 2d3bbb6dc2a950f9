"""Data parallel: replicas (zero 0), ZeRO (zero 1, 2, 3), and replicas of shards (hybrid), on FSDP2.

One bucket per decoder layer and one for embedding, final norm and head: fixed before the first step and never
rebuilt, so a gradient is summed in the same order in every step. Gradients are plain sums over the data
axes: the loss is already divided by the token count of the whole global batch.
"""

from typing import cast

import torch
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fivefold.config.tree import Precision
from fivefold.nn.decoder import Decoder
from fivefold.spec.mesh import Mesh

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def master_dtype(precision: Precision) -> torch.dtype:
    """The type of parameters, gradients' sums and optimizer state: float32, or float64 under float64."""
    return torch.promote_types(DTYPES[precision.dtype], torch.float32)


class DataParallel:
    """The data axes around a decoder, and when they communicate."""

    def __init__(
        self, decoder: Decoder, device_mesh: DeviceMesh | None, mesh: Mesh, zero: int, precision: Precision
    ) -> None:
        compute, master = DTYPES[precision.dtype], master_dtype(precision)
        self.zero = zero
        self.root: FSDPModule | None = None
        if device_mesh is None or (mesh.data_parallel == 1 and compute == master):
            return
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master, cast_forward_inputs=False)
        units = [*decoder.layers.values(), decoder]
        for unit in units:
            if zero == 0:
                replicate(unit, mesh=device_mesh["dp_replicate"], mp_policy=policy)
            else:
                axes = ("dp_replicate", "dp_shard") if mesh.dp_replicate > 1 else ("dp_shard",)
                # zero 1 and 2 hold whole parameters during a step: gathered once, dropped after its end.
                reshard = None if zero == 3 else False  # None: torch's rule, all but the root
                fully_shard(unit, mesh=device_mesh[axes], mp_policy=policy, reshard_after_forward=reshard)
            cast(FSDPModule, unit).set_gradient_divide_factor(1.0)
            # A factor of one would otherwise become a pre-multiplied sum, which gloo does not have.
            cast(FSDPModule, unit).set_force_sum_reduction_for_comms(True)
        self.root = cast(FSDPModule, decoder)

    def begin_micro_step(self, last: bool) -> None:
        """Sets what the coming backward communicates.

        zero 0 and 1 hold whole gradients, so they reduce once, after the last micro-batch. zero 2 and 3 hold
        gradients in shards, so each backward reduce-scatters; only the sum over the replicas of a shard waits
        for the last. zero 1 and 2 hold whole parameters until the end of the last backward.
        """
        if self.root is None:
            return
        if self.zero <= 1:
            self.root.set_requires_gradient_sync(last)
        else:
            self.root.set_requires_all_reduce(last)
        if self.zero in (1, 2):
            self.root.set_reshard_after_backward(last)
        self.root.set_is_last_backward(last)

    def drop_gathered(self) -> None:
        """Drops the parameters that a forward without a backward has left gathered."""
        if self.root is None or self.zero == 0:
            return
        for unit in self.root.modules():  # type: ignore[attr-defined]
            if isinstance(unit, FSDPModule):
                unit.reshard()
