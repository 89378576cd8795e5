"""Measurements that `kveik bench`, `kveik evaluate` and `kveik cache replay` print."""
