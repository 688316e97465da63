"""Mixtures of experts: their routers."""
