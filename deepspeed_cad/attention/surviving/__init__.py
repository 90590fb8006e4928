"""Attention calls that go on where servers change: each of their passes can run again with other servers."""
