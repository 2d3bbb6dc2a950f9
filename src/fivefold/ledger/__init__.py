"""Memory, traffic, FLOPs and time of one layout, by arithmetic alone."""
