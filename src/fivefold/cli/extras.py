"""What the optional parts of the installation are for."""

from importlib.util import find_spec

from fivefold.config.errors import BadInput


def require_torch() -> None:
    """Raises BadInput where torch is not installed; imports nothing."""
    if find_spec("torch") is None:
        raise BadInput('this needs torch: pip install "fivefold[train]"')
