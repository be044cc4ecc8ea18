"""Ordered procedures: they gather facts, ask `plan` what to do, and do it in the order that keeps every guarantee.

Executors hold no policy. Time, threads, ids and waits come from `env`, so that each procedure can run on one thread in a test.
"""
