"""A cluster on one machine: network namespaces are its nodes, and their links are shaped.

    sudo python -m benchmarks.shaped_cluster [--quick] [--json FILE] [--model gpt]

Ranks are started by `tfpar run -H` as on real machines, two on each of two nodes and one on each
of four, and train with data parallelism, Megatron's layout and the searched plan at several
bandwidths. Told are the seconds of a step, and the bytes that the nodes' interfaces have sent
beside those that the plan predicts. Linux, root, `ip` and `tc` (iproute2) and Horovod are needed.

`--unequal`: nodes of unequal speed and links, and a dozen plans (`unequal`).
"""
