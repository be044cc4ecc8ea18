"""Bytes by key. Knows no checkpoint: keys, bytes, conditions and errors only."""
