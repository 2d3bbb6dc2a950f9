"""What a compressor remembers between steps, by parameter (on another number of ranks:
`trainer.state.RegroupedCompression`)."""

import torch
from torch import Tensor

State = dict[str, Tensor]

OWN, SHARED = "own/", "shared/"


class Memory:
    """Tensors by parameter name; the changes of a step are pending until `settle`.

    `own` tensors differ between ranks, and only their sum over the ranks matters; `shared` ones are equal on all ranks.
    """

    def __init__(self) -> None:
        self._kept: State = {}
        self._pending: State = {}

    def own(self, kind: str, name: str, like: Tensor) -> Tensor:
        """The newest value, shaped as `like`; zeros at first. Not to be written to."""
        return self._get(f"{OWN}{kind}/{name}", like)

    def shared(self, kind: str, name: str) -> Tensor | None:
        key = f"{SHARED}{kind}/{name}"
        return self._pending.get(key, self._kept.get(key))

    def set_own(self, kind: str, name: str, value: Tensor) -> None:
        self._pending[f"{OWN}{kind}/{name}"] = value

    def set_shared(self, kind: str, name: str, value: Tensor) -> None:
        self._pending[f"{SHARED}{kind}/{name}"] = value

    def settle(self, applied: bool) -> None:
        """Commits the changes of the step if it was applied, else discards them."""
        if applied:
            self._kept.update(self._pending)
        self._pending = {}

    def tensors(self) -> list[Tensor]:
        """All it holds, the changes of a step under way included."""
        return [*self._kept.values(), *self._pending.values()]

    def state_dict(self) -> State:
        """What is kept, sharing storage. A step that is not settled is no part of it."""
        return dict(self._kept)

    def _get(self, key: str, like: Tensor) -> Tensor:
        found = self._pending.get(key, self._kept.get(key))
        return torch.zeros_like(like) if found is None else found.view(like.shape)
