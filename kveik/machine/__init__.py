"""The machine as the process finds it: memory limits, threads, huge pages."""
