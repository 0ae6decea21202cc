"""What a cluster would need: a pure analytic model of offloading to SSDs.

ssdtrain project --cases figure-5.10 --cost
"""
