"""Memory by category equals what is computed by hand, to the byte."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fivefold.observe.memory import MemoryByCategory, SavedActivations, memory_by_category, storage_bytes
from ranks import Ranks

F32 = 4


def held_by(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def test_storages_count_once() -> None:
    base = torch.zeros(6, 4)
    assert storage_bytes([base, base[2:], base.t(), base.view(24)]) == 96
    assert storage_bytes([base[:1]]) == 96  # a slice keeps all of it alive
    assert storage_bytes([torch.zeros(1).expand(1000)]) == 4
    assert storage_bytes([torch.zeros(0), torch.zeros(3, dtype=torch.float64)]) == 24
    assert storage_bytes([]) == 0


class Tied(nn.Module):
    """A table used twice (4 × 3), a buffer (3) and a view of it as another buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=True)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("first", self.get_buffer("scale")[:1])

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.embedding(tokens) * self.scale)
        return output


def test_categories_of_a_small_module() -> None:
    module = Tied()
    optimizer = torch.optim.AdamW(module.parameters())
    tokens = torch.tensor([0, 1, 3])
    with SavedActivations(held_by(module)) as activations:
        module(tokens).sum().backward()
    optimizer.step()

    parameters = (4 * 3 + 4) * F32
    assert memory_of(module, optimizer, activations.peak_bytes) == MemoryByCategory(
        parameters=parameters,
        gradients=parameters,
        optimizer=2 * parameters + 2 * F32,  # two moments, and a step count for each of two parameters
        # the tokens (int64) for the embedding's backward, and the head's input [3, 3]; the scale is a buffer and
        # its other factor is not kept, since a buffer needs no gradient
        activations=3 * 8 + 3 * 3 * F32,
        buffers=3 * F32,
    )


def test_a_storage_of_two_categories_counts_in_the_first() -> None:
    module = nn.Linear(4, 4, bias=False)
    module.weight.grad = module.weight.detach()
    assert memory_of(module, None, 0) == MemoryByCategory(64, 0, 0, 0, 0)
    assert memory_of(module, None, 0).total == 64


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 8))


def test_activations_of_two_layers() -> None:
    """[5, 8] → [5, 16] → [5, 8]: kept are the input and the sigmoid's output, which the second layer shares."""
    module = mlp()
    with SavedActivations(held_by(module)) as activations:
        module(torch.randn(5, 8)).sum().backward()
    assert activations.peak_bytes == (5 * 8 + 5 * 16) * F32
    assert activations.live_bytes == 0


def test_views_of_one_activation_count_once() -> None:
    wide = torch.randn(4, 6, requires_grad=True)
    with SavedActivations([]) as activations:
        left, right = (wide * 1.0).chunk(2, dim=1)
        product = left * right  # each is saved for the other's gradient; both live in one storage of 24
        assert activations.peak_bytes == 24 * F32
        torch.autograd.backward(product.sum())
    assert activations.live_bytes == 0


def test_gradients_are_the_same_bits() -> None:
    torch.manual_seed(0)
    module, inputs = mlp(), torch.randn(5, 8)
    module(inputs).square().sum().backward()
    plain = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    with SavedActivations(held_by(module)):
        module(inputs).square().sum().backward()
    for before, parameter in zip(plain, module.parameters(), strict=True):
        assert before is not None
        assert parameter.grad is not None
        assert torch.equal(before, parameter.grad)


def test_peak_is_of_what_is_alive_at_once() -> None:
    """Accumulation frees each micro-batch before the next; a pipeline holds several."""
    module = mlp()
    one = (5 * 8 + 5 * 16) * F32
    with SavedActivations(held_by(module)) as accumulated:
        for _ in range(3):
            module(torch.randn(5, 8)).sum().backward()
    with SavedActivations(held_by(module)) as in_flight:
        losses = [module(torch.randn(5, 8)).sum() for _ in range(3)]
        for loss in losses:
            torch.autograd.backward(loss)
    assert (accumulated.peak_bytes, in_flight.peak_bytes) == (one, 3 * one)
    assert in_flight.live_bytes == 0


def test_a_forward_without_backward_lets_go() -> None:
    """An output saved by its own node (sigmoid) must not keep itself alive."""
    module = mlp()
    with SavedActivations(held_by(module)) as activations:
        output = module(torch.randn(5, 8))
        assert activations.live_bytes == (5 * 8 + 5 * 16) * F32
        del output
        assert activations.live_bytes == 0


def test_a_checkpointed_layer_keeps_its_input_only() -> None:
    first, second = mlp(), mlp()
    excluded = [*held_by(first), *held_by(second)]
    inputs = torch.randn(5, 8, requires_grad=True)
    with SavedActivations(excluded) as activations:
        middle = first(inputs)
        output = checkpoint(second, middle, use_reentrant=False)
        # first: its input and the sigmoid's output; second: its input (the random state is no saved tensor)
        assert activations.live_bytes == (5 * 8 + 5 * 16 + 5 * 8) * F32
        output.sum().backward()
    assert activations.peak_bytes == (5 * 8 + 5 * 16 + 5 * 8) * F32
    assert activations.live_bytes == 0


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def memory_of(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, activations: int
) -> MemoryByCategory:
    states = optimizer.state.values() if optimizer else []
    return memory_by_category(
        parameters=module.parameters(),
        gradients=[p.grad for p in module.parameters() if p.grad is not None],
        optimizer=[value for state in states for value in state.values() if isinstance(value, torch.Tensor)],
        buffers=module.buffers(),
        activations=activations,
    )


def sharded_sizes(rank: int, world_size: int) -> tuple[MemoryByCategory, int]:
    """A tensor-parallel parameter: each rank holds 2 of 4 rows."""
    mesh = init_device_mesh("cpu", (world_size,))
    module = nn.Linear(3, 4, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    inputs = distribute_tensor(torch.ones(5, 3), mesh)
    with SavedActivations(held_by(module)) as activations:
        module(inputs).sum().backward()
    # DTensor may leave a gradient replicated; here it is what a tensor-parallel layer makes of it
    module.weight.grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    optimizer.step()
    return memory_of(module, optimizer, activations.peak_bytes), storage_bytes([module.weight])


def test_a_dtensor_counts_its_local_part(pair: Ranks) -> None:
    local = 2 * 3 * F32
    for memory, weight in pair.run(sharded_sizes):
        assert weight == local
        assert memory == MemoryByCategory(local, local, local, activations=5 * 3 * F32, buffers=0)


def gathered_activations(rank: int, world_size: int) -> tuple[int, int, int]:
    mesh = init_device_mesh("cpu", (world_size,))
    module = mlp()
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    with SavedActivations(held_by(module)) as activations:
        module(torch.randn(5, 8)).sum().backward()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return activations.peak_bytes, storage_bytes(module.parameters()), storage_bytes(gradients)


def test_parameters_gathered_by_fsdp_are_no_activations(pair: Ranks) -> None:
    """Why a saved tensor's `_base` is asked: a gathered weight lives in a storage made during the forward."""
    parameters = (8 * 16 + 16 + 16 * 8 + 8) * F32 // 2
    for activations, sharded, gradients in pair.run(gathered_activations):
        assert activations == (5 * 8 + 5 * 16) * F32
        assert (sharded, gradients) == (parameters, parameters)
