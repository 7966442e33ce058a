"""Slotwire: an async gRPC service over llama.cpp."""

__version__ = "0.1.0"
