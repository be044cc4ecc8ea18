"""Bytes ⇄ values of format version 1. Pure. `docs/format-v1.md` is the normative text."""
