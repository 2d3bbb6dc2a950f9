"""The decoder and its parts. Parameters are named as in `spec.parameters`; nothing here knows of ranks."""
