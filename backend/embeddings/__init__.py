"""Replicas of embedding models: texts in, vectors out.

Domain: a *job* is one request, an *input* one of its texts as token ids. Owner of state: one process, which
holds the weights, one queue of inputs and one thread that computes batches of them. Invariants: the queue is
bounded; an input is computed once or dropped because its job is gone; a job that began to be computed ends in
exactly one recent usage. Time: the event loop's clock.
"""
