"""Local S3 servers for tests, the demo and the benchmarks. See README.md in this directory."""
