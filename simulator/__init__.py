"""What a fleet will do before it is bought: a discrete-event simulator around the code that serves.

Domain: requests arrive from a trace or from simulated sessions, are ranked by the gateway's own routing,
and run on replicas whose blocks, prefix cache and (in the fine model) scheduler are the engine's own. Only
time is made up: a step takes what a fitted :class:`~simulator.step_time.StepTime` says.

State: all of it belongs to one :class:`~simulator.fleet.Fleet`; nothing outlives a run. Equal inputs and
seeds give equal results.

Time: seconds from the start of a run, never the wall clock.
"""
