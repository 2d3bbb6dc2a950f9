"""One thin module per command: arguments → one call → rendering."""
