"""The agent that runs inside every sandbox: it owns commands, their output, and files.

Standard library only; one code base for every runtime. It knows nothing of images, keys or lifecycles: it
listens on a descriptor that it was given, checks the sandbox's token and serves the protocol of `wire`.
"""
