"""Benchmarks: tieredckpt beside what else there is, in one run on one machine."""
