"""Documents become Markdown here, each in a process of its own.

Domain: files of the kinds in :mod:`gateway.markdown.formats`, converted by maintained libraries. State: none;
a document lives as long as its conversion. Invariants: the event loop never reads a document, and no document
takes more time, memory or output than the configuration says, because its process is ended. Time: seconds.
"""
