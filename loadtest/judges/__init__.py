"""Benchmarks of others as judges: they send, they count, and their counts must be those of the bill.

Each judge is a program in an environment of its own, which is only run, never imported.
"""
