"""Additions to chapter 3, engine.py: sliding windows, swapping, samples of one prompt, drafts, several GPUs, and
smaller steps when memory is short."""
