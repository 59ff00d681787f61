"""KV blocks on their way between replicas, and between the tiers of one replica's cache.

What leaves a KV cache is a *record*: one block's content with the full name of what it is. Who takes one in
compares that name with what it wants and the checksum with what it got; nothing is believed.
"""
