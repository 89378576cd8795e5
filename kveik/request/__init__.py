"""What is asked (immutable, checked) and how far it has come (the one mutable thing per request)."""
