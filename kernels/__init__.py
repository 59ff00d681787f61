"""The workshop: every op with its contract, a plain torch reference, and fast forms.

One folder per op. Its ``__init__`` holds the contract (shapes, dtypes, what is raised) and the dispatch,
``reference.py`` the plain torch form that defines the result, ``native.c`` the form for CPUs, ``cases.py``
the shapes that tests and benchmarks share. Every op takes ``native``, a
:class:`kernels.native.NativeLibrary` or None; None runs the reference. A native op takes contiguous float32
CPU tensors.

Rows are independent: what a native op computes for one token has the same bits whatever else is in the batch
and however a prompt was cut into chunks.
"""
