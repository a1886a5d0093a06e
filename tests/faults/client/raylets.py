"""`python raylets.py` runs three raylets, at 127.0.0.2 to .4, until its standard input ends.

It prints the address of their client server, and the process ids of the raylets, as JSON.
"""

import json
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
        for number, ip in enumerate(("127.0.0.2", "127.0.0.3", "127.0.0.4")):
            ports = {"ray_client_server_port": CLIENT_PORT, "runtime_env_agent_port": AGENT_PORT}
            cluster.add_node(node_ip_address=ip, **{**node, **({} if number else ports)})
        pids = [
            each.process.pid
            for node in cluster.list_all_nodes()
            for each in node.all_processes["raylet"]
        ]
        address = f"ray://127.0.0.2:{CLIENT_PORT}"
        print(json.dumps({"address": address, "raylets": pids}), flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()
        time.sleep(0.5)


if __name__ == "__main__":
    main()
