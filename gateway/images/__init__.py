"""Images of requests: whether the model sees them, how many there may be, and which may be fetched.

Owner of state: one gateway process (fetches in progress). Invariants: an image that is elsewhere is fetched
once for a request, whatever the number of replicas tried, and reaches a replica as bytes, which alone decide
what its blocks share; what is connected to is an address that was checked, of a host that is allowed.
"""
