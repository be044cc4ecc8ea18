"""How long ranks may take to start; told apart so that a rank can set its limit before it imports torch."""

START_S = 150.0
"""For the import of torch and the first meeting of the ranks."""
