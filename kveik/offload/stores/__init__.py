"""Stores of records, siblings of equal shape: memory, disk, and a remote server."""
