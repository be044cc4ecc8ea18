"""The demonstration behind `make demo-distributed`: a job of four ranks loses a node, and goes on with two ranks, and with eight."""
