"""Ranks that do not come, or that are elsewhere: who is where, and one error on every rank that names them."""
