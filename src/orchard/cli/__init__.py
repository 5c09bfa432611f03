"""The command line, `orchard`. Modules here import what is heavy inside functions: it starts quickly."""
