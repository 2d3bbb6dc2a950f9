"""Whether torch.compile finds a C++ compiler. Imports no torch: checked before ranks start."""

import os
import shutil
import sys

from fivefold.config.errors import BadInput
from fivefold.config.tree import Machine


def check_compiler(machine: Machine) -> None:
    """Refuses `machine.compile` where torch would find no C++ compiler.

    Raises:
        BadInput: in one line.
    """
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if machine.compile and shutil.which(compiler) is None:
        raise BadInput(
            f"machine.compile = true: no C++ compiler here ({compiler}); install one, name another in the "
            "environment as CXX, or set machine.compile = false"
        )
