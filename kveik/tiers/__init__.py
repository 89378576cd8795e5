"""Blocks below the pool, as records in memory, on disk and in a remote server. Knows bytes, files, sockets and threads."""
