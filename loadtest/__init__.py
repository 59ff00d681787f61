"""The stranger at the door: load from outside, which imports nothing of the rest of the house."""
