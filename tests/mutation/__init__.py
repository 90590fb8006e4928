"""Parts of tests/mutate.py."""
