"""Asynchronous batches: many requests in one submission, answered when replicas have room.

Domain: a *batch* is one submission of an account, an *item* one request of it. An item is ``queued``,
``leased`` to the worker of one gateway, and then ended: ``succeeded``, ``failed``, ``expired`` or
``cancelled``.

Owner of state: the ledger's database (``billing.batch_schema``), through ``queue``, ``closing`` and
``files``. No process holds anything that another could not take over; any number of gateways may share one
database.

Invariants: an item ends once; what it used is recorded, priced and posted in the very transaction that ends
it, so it has one usage record if it succeeded and none otherwise. Ended items are never run again.

Time: integer microseconds, UTC, of the gateways' clocks. A lease that runs out is taken back by anyone; a
worker that was only slow finds out when it tries to end the item, because each lease has its own number.
"""
