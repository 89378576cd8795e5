"""kveik and the engines a user would pick instead, on the same files and machine, in turn: `python -m benchmarks.peers`."""
