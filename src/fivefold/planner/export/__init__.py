"""The layout in the words of its peers. Each module: `emit(job) → (text, what the peer cannot express)`."""
