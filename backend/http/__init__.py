"""The HTTP side of a replica, in small parts; :mod:`backend.server` puts them together."""
