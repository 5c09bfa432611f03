"""Several services on one machine that share a state directory and the work.

seats.py       places in the state directory, each with its sandboxes, held by one service at a time
household.py   the seats that this service holds: its own, and those of services that died
neighbours.py  who holds what; creations that no two services make twice
sockets.py     how a seat is reached by other services
forward.py     requests passed on to the service that holds the sandbox
front.py       which requests go where
gather.py      answers put together from all services
following.py   the events of all services as one stream
"""
