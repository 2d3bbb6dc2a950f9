"""Search over layouts, with reasons."""
