"""The counting house: from what was consumed to what is owed.

Domain: a ``UsageRecord`` is priced by the ``RateCard`` in force when the request started, which gives a
``Charge``; the charge makes one ``Transaction`` whose entries sum to zero. Accounts pay; API tokens say who
asks.

Owner of state: ``spool`` holds records that are durable and not yet posted, ``store`` everything else. Both
are append-only as far as usage and money are concerned; a correction would be a new record.

Invariants: one record per request id, one transaction per record, sums of zero, integers only, and pricing
again gives the same. ``audit`` proves them at any time.

Time: integer microseconds, UTC; windows are half-open. Clocks are handed in.
"""
