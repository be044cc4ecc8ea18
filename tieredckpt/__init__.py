"""tieredckpt."""
