"""Measurements of this machine and of layouts on it."""
