"""Multi-process launch: start processes on many hosts, monitor them, and restart them after a failure.

One supervisor runs where `sharding launch` was called. On every host an agent starts that host's processes, forwards
their output and heartbeats, and kills them on request or when it loses the supervisor. Clusters differ only in how the
supervisor reaches the agents. After a failure, on every cluster, all processes are killed and restarted, and the
program resumes from its newest checkpoint.

In: launch options and a command. Out: the program's output and exit code.
"""
