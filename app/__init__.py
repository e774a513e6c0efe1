"""Fairgate: one model, many tenants, one process.

The life of a request, in the order of the modules that it meets:

1. ``http/edge.py`` opens a `Record`, gives it an id, and sets ``current_record``.
2. ``http/auth.py`` finds the tenant by its key and puts it on the Record, or answers 401.
3. vLLM's own router parses the body and asks `EngineGate.check_admission` whether to go on.
4. vLLM renders the prompt and calls `EngineGate.generate`, which states the `Demand` and strips
   what a client may not set for itself.
5. ``admission/admission.py`` hands out a `Slot`, or raises `Rejected`.
6. ``engine/gate.py`` streams from the engine and counts tokens onto the Record.
7. The Slot is released once, by whoever ends first.
8. ``http/edge.py`` has let the response out at the decision, or writes the refusal; it closes the
   Record, and the observers (``telemetry/``) are told once.

``server.py`` builds all of these, in the same order. Start there.
"""
