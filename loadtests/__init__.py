"""Load tests: each scenario starts the servers it compares, loads them in turn, and says what it saw.

``python -m loadtests SCENARIO`` writes a Markdown report, plots and a JSON file; the last line it
prints is ``SCENARIO key=value …``. The layers, from below: ``stats`` and ``cpu`` (arithmetic and
/proc), ``wire`` (one connection), ``client`` (the load, in a process of its own), ``servers`` (what
is under test), ``report``, and on top one module a scenario.
"""
