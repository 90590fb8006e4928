"""Varlen attention kernels: one file per backend, one registry that chooses among them."""
