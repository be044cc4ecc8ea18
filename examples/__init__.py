"""Programs to read, to run and to copy from. See README.md."""
