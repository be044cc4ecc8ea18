"""The protocol explored: every interleaving of a few actors, with the library's own decisions.

`make_all` below is the whole search; the tests bound each configuration so that together they take seconds. A configuration that is
cut off has been searched breadth first, so all its short interleavings have been seen.
"""
