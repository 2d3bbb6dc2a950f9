"""The mesh of axes as torch's DeviceMesh."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fivefold.spec.mesh import AXES, Mesh


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """A DeviceMesh with all five axes, also those of one rank; each axis has a group of its own.

    An axis that spans the whole world would otherwise re-use the default group, and its traffic could not be
    told from the world's; naming its backend prevents that.
    """
    backend = dist.get_backend()
    return init_device_mesh(
        device.type,
        mesh.shape,
        mesh_dim_names=AXES,
        backend_override={axis: backend for axis in AXES if getattr(mesh, axis) == mesh.world_size > 1},
    )
