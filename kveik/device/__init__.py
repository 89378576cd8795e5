"""Device: memory of the pool, copies of blocks, threads and instruction set."""
