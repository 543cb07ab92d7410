"""Tierwise: train models that do not fit, planned from one number, the budget in bytes."""

__version__ = "0.1.0"
