"""Collectives between the ranks of one host through memory they share, and over gloo between hosts."""
