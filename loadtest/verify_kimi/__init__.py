"""A scorecard of a served Kimi, in the manner of the vendor's verifier: ``python -m loadtest.verify_kimi``.

It asks an OpenAI-form endpoint what the vendor's tools ask, and judges the answers from outside: whether the
model calls tools when it should, whether arguments meet their schemas, whether finish reasons say what
happened, whether a stream says what a whole answer says, and whether what cannot be served is refused.

Rows about the form of answers hold for any weights. Rows about decisions of the model are meant for real
ones: with random weights they are printed and not asserted.
"""
