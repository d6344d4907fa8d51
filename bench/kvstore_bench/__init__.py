"""Benchmarks of kvstore: every speed is a ratio to a limit taken in the same run, interleaved with it."""
