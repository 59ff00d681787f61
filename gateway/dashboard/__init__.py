"""Pages that people read: spend, cached share, latency, requests, budgets, batches, replicas, savings."""
