"""The demonstration behind `make demo`: kill a job in the middle of a save, lose its node, continue it bit for bit."""
