"""Additions to chapter 3, engine.py: sliding windows, swapping, several GPUs, smaller steps when memory is short."""
