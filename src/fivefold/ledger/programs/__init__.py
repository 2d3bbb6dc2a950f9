"""Collective algorithms as lists of steps, from which cost, drawing and execution derive."""
