"""Twins of the outside parties, for development and for tests."""
