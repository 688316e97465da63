"""A GPU kind of a user's own, as a file of cluster.hardware describes it."""

OWN_KIND = """
[own]
words = ["Own"]
bf16 = 400
fp32 = 50
memory_gib = 64
bandwidth = 2000
link = 200
link_kind = "nvlink"
node = 4
network = 50
multiprocessors = 100
source = "measured here"
efficiency_as = "h100-sxm"
"""
