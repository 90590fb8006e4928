"""The package's version, read by setuptools without importing anything."""

__version__ = "0.1.0"
