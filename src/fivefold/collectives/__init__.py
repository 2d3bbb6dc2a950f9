"""Collective operations: recorded as they happen, executed by algorithm, compressed, calibrated."""
