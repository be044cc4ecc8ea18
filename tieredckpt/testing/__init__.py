"""The test kit: the conformance suite of stores and a store that fails on command. Needs pytest; the library does not."""
