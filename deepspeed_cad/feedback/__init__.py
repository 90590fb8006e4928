"""Feedback: what ranks learn of each other while they train, from measurements that travel with document lengths.

Each kind of measurement is a `Reporter`: it says what this rank measured, and hears what all ranks did, at the same
point on every rank. So plans, which must be equal on all ranks, may depend on it.
"""
