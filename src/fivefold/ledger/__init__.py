"""Memory, traffic, FLOPs and time of a layout, from arithmetic alone. No torch."""
