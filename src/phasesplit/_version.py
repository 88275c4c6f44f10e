"""The version, apart from the public names so that every module may print it."""

__version__ = "0.1.0"
