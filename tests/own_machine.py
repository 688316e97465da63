"""A file as `meshtune probe` writes it, of a made-up machine: 2 cores, measured with 1, 2 and 4 ranks."""

OWN_MACHINE = """
[cluster]
gpu = "this-cpu"
gpus_per_node = 4

[kind]
words = ["(cpu)"]
architecture = "cpu"
bf16 = 0.2
fp32 = 0.1
matmul_max = 0.2
memory_gib = 8
bandwidth = 20
link = 4
link_kind = "pcie"
node = 4
network = 12.5
multiprocessors = 2
source = "made up"
attention_kernel = { forward = [0.25, 0.5, 0.5], keys = 64, backward = 1.5 }

[kind.efficiency]
matmul = 0.8
depth = 20
tiles = 0.01
misaligned = 1.1
unloaded = 1.2
attention = 1
clock = 1
memory = 0.9
link_share = 0.5
launch = 5e-6
launch_blocking = 1
link_latency = 1e-4

[[kind.shared]]
ranks = 2
matmul = 0.4
memory = 0.45
link_share = 0.5

[[kind.shared]]
ranks = 4
matmul = 0.2
memory = 0.2
link_share = 0.2
link_latency = 3e-4
"""
