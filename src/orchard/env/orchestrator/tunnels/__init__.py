"""Tunnels: what user code of a sandbox connects to on its loopback is carried on to a target that the operator allows."""
