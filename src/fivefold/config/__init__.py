"""The Config tree, TOML in and out, help texts. Imports nothing of Fivefold."""
