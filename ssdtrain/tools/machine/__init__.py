"""What this machine is and can do: facts, measured links, findings with advice.

ssdtrain doctor --directory /mnt/nvme0 --save links.json
"""
