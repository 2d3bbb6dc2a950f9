"""Parity with one process, ledger against measurement, injected faults."""
