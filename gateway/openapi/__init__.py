"""The OpenAPI document of the gateway's own surface, put together from a part for each group of routes.

A part says what its routes take and which statuses they answer with; schemas of bodies come from the structs
that decode them. A test compares the routes of the document with those of the application.
"""
