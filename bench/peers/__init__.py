"""Rivals of the suite, one file each, started on loopback and loaded as we are. Nothing of the product needs them."""
