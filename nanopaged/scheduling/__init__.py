"""Additions to chapter 3, engine.py: sliding windows, swapping, smaller steps when memory is short."""
