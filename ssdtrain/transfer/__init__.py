"""Moves bytes between a device and a target: streams, staging, back-pressure.

Not named `offload`: importing a package of that name would shadow the function
`ssdtrain.offload`.
"""
