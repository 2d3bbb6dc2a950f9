<<<<<<< HEAD
"""Memory, traffic, FLOPs and time of one layout, by arithmetic alone."""
=======
"""Memory, traffic, FLOPs and time of a layout, from arithmetic alone. No torch."""
>>>>>>> main
