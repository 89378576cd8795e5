"""Scripts that measure. They are run by hand or by make; nothing of the package needs them."""
