"""`tenure train`: flags, ranks, what is shown and written. The loop itself is C++."""
