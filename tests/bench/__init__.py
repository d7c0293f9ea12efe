"""Benchmarks: what Tollgate adds to a call, as ratios within one run. Started by `make bench`."""
