"""Peers: reading chunks straight from the host memory of another instance.

``docs/reference/peer-protocol.md`` describes the messages and their invariants. The parts:

============ =================================================================
protocol     messages between peers: shapes, bounds, proofs
link         messages between a serving process and the owner of the arena
hub          the server's side of all sessions, without I/O
session      the client's side of one session, without I/O
credentials  tokens and keys, from configuration
transport    the contract of what carries messages and payload
zmq_carrier  messages and payload over ZMQ
stream       payload over a TCP connection of its own
nixl_agent   what is used of NIXL
nixl_region  a server's memory, read one-sided over NIXL
nixl_reader  the threads that read it
choice       which transport it is to be
server       the loop of a serving process
client       the thread that reads from one peer
calls        what other threads wait for
directory    which peers hold which chunks, as their events tell
============ =================================================================
"""
