"""Values: boxes, leaves, the state tree, ids and digests. Pure: no I/O, clock, randomness, threads or torch."""
