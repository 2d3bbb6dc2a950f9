"""The mesh of axes as torch's DeviceMesh."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fivefold.spec.mesh import AXES, Mesh


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """A DeviceMesh with all five axes, also those of one rank.

    A one-dimensional mesh over the whole world would re-use the default group, and its traffic could not be
    told from the world's; with five dimensions every axis has a group of its own name.
    """
    return init_device_mesh(device.type, mesh.shape, mesh_dim_names=AXES)
