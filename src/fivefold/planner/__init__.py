"""Search over layouts, explanation, validation against published runs."""
