"""`python raylets.py` runs three raylets, at 127.0.0.2 to .4, until its standard input ends.

It prints the address of their client server. The second and third raylet begin with a line of its
input: it prints the process id of each, and so for every further line, at the next address.
"""

import sys
import time
from typing import Any

from ray.cluster_utils import Cluster

CLIENT_PORT, AGENT_PORT = 25001, 25002


def main() -> None:
    cluster: Any = Cluster()
    node: dict[str, Any] = {
        "num_cpus": 1,
        "object_store_memory": 80 << 20,
        "include_dashboard": False,
        "include_log_monitor": False,
        "no_monitor": True,
    }
    try:
        ports = {"ray_client_server_port": CLIENT_PORT, "runtime_env_agent_port": AGENT_PORT}
        cluster.add_node(node_ip_address="127.0.0.2", **node, **ports)
        print(f"ray://127.0.0.2:{CLIENT_PORT}", flush=True)
        for number, _ in enumerate(sys.stdin, 3):
            added = cluster.add_node(node_ip_address=f"127.0.0.{number}", **node)
            (raylet,) = added.all_processes["raylet"]
            print(raylet.process.pid, flush=True)
    finally:
        cluster.shutdown()
        time.sleep(0.5)


if __name__ == "__main__":
    main()
