"""Where each axis is applied to the model: `apply.py` reads in the order the axes are applied."""
