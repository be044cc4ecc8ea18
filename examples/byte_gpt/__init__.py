"""A small but complete training job: a byte-level GPT on the Python standard library's own source text."""
