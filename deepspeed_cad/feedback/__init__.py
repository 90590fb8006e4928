"""Feedback: what ranks learn of each other, so that plans, which must be equal on all ranks, may depend on it.

Costs of attention are shared once, at the start. All else is measured while training and travels with document lengths:
each kind is a `Reporter`, which says what this rank measured, and hears what all ranks did, at the same point on every
rank.
"""
