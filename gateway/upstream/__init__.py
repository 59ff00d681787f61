"""The one way to a replica: pooled keep-alive connections, deadlines, aborts. See :mod:`gateway.client`."""
