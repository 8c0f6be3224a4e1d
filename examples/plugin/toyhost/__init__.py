"""A small library that knows nothing of flashot-backends."""

from .matching import soft_match

__all__ = ["soft_match"]
