"""Plan, prove and run distributed training of language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.proof.verify_module import Layout, Verdict, verify

__all__ = ["Layout", "Verdict", "verify"]

_HOMES = {"Layout": "proof.verify_module", "Verdict": "proof.verify_module", "verify": "proof.verify_module"}


def __getattr__(name: str) -> Any:
    """Public names load when they are asked for: `import fivefold` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fivefold' has no attribute '{name}'")
    return getattr(import_module(f"fivefold.{_HOMES[name]}"), name)
