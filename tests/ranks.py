"""Ranks for tests: those that `fivefold verify` uses."""

from fivefold.proof.ranks import RankError, Ranks, run_ranks

__all__ = ["RankError", "Ranks", "run_ranks"]
