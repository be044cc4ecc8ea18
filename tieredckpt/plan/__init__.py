"""Decisions: values in, frozen plans out.

Everything that could be decided differently is decided here, by pure functions over values that the engine has gathered: no I/O,
clock, randomness, threads or torch. So a decision can be explored, replayed and shown to a person before anybody acts on it.
"""
