"""Records collectives by a dispatch mode, for backends that are not wrapped: a wrapping group would split what NCCL
coalesces.

It costs some microseconds per tensor operation, so only the profiled step is recorded this way.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.collectives.group import axis_of
from fivefold.collectives.record import Primitive, Recorder

_Size = Callable[[Sequence[Any], Any], int]


def bytes_of(value: Any) -> int:
    """Bytes of a tensor or of nested lists of tensors."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(bytes_of, value))


def _first(args: Sequence[Any], result: Any) -> int:
    return bytes_of(args[0])


def _second(args: Sequence[Any], result: Any) -> int:
    return bytes_of(args[1])


def _result(args: Sequence[Any], result: Any) -> int:
    return bytes_of(result)


_OPERATORS: dict[str, tuple[Primitive, _Size]] = {
    "c10d::allreduce_": ("all_reduce", _first),
    "c10d::allreduce_coalesced_": ("all_reduce", _first),
    "c10d::allgather_": ("all_gather", _first),
    "c10d::_allgather_base_": ("all_gather", _first),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", _first),
    "c10d::reduce_scatter_": ("reduce_scatter", _second),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", _second),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", _second),
    "c10d::alltoall_": ("all_to_all", _second),
    "c10d::alltoall_base_": ("all_to_all", _second),
    "c10d::broadcast_": ("broadcast", _first),
    "c10d::reduce_": ("reduce", _first),
    "c10d::send": ("send", _first),
    "c10d::recv_": ("recv", _first),
    "_c10d_functional::all_reduce": ("all_reduce", _first),
    "_c10d_functional::all_reduce_": ("all_reduce", _first),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", _first),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", _result),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", _result),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", _first),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", _first),
    "_c10d_functional::all_to_all_single": ("all_to_all", _first),
    "_c10d_functional::broadcast": ("broadcast", _first),
}
"""Operator → primitive, and where its bytes are by the ledger's conventions."""


class DispatchRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts into `recorder` what passes torch's dispatcher inside its block, as `RecordingGroup` does.

    Groups of one rank are not counted.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if known := _OPERATORS.get(func._schema.name):
            primitive, size = known
            group = _group(func, args)
            if group.size() > 1:
                self._recorder.add(axis_of(group.group_desc), primitive, size(args, result))
        return result


def _group(func: Any, args: Sequence[Any]) -> dist.ProcessGroup:
    """The group among an operator's arguments: boxed in c10d's, named in the functional ones."""
    names = [argument.name for argument in func._schema.arguments]
    if "group_name" in names:
        return _resolve_process_group(args[names.index("group_name")])
    return dist.ProcessGroup.unbox(args[names.index("process_group")])
