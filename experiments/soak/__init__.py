"""A soak under chaos: many clients, and everything that can die or run full does so at random moments.

`python -m experiments.soak --seconds 600` runs it and writes what happened; `tests/chaos/test_soak.py` runs it for two
minutes. Clients (`clients`) write down what the service acknowledged, each process in a ledger of its own that outlives it;
`strikes` disturbs; `verdict` compares the ledgers with what the service still knows.
"""
