"""Attention calls that go on where reserved servers change: each of their passes can run again with other servers."""
