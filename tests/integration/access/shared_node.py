"""A daemon as root's with two users, and what they ask of it."""

import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1.loader_pb2_grpc import LoaderStub

from tests.channels import identified_channel
from tests.conftest import Daemon, to_toml
from tests.preloaded.interpreter import Interpreter
from tests.users import User, open_to_everybody

CAROL, ALICE, BOB = 65532, 65533, 65534
DEADLINE_S = 120
ORDER = pb.OrderSpec(global_batch_size=20)


class Node:
    """A daemon as root's, with users."""

    def __init__(self, folder: Path, interpreter: Interpreter) -> None:
        self.folder = folder
        (folder / "data").mkdir()
        for name in ("open", "alice", "secret"):
            np.arange(4000, dtype=np.uint16).tofile(folder / "data" / f"{name}.bin")
        config = folder / "gyre.toml"
        self.config: dict[str, Any] = {
            "listen": [f"unix:{folder}/run/gyre.sock", "tcp:127.0.0.1:0"],
            "metrics_listen": "tcp:127.0.0.1:0",
            "index_dir": str(folder / "index"),
            "drain_timeout_s": 1.0,
            "datasets": {
                "open": self.dataset("open", ["anyone"]),
                "alice": self.dataset("alice", [f"uid:{ALICE}", "job:train*"]),
                "secret": self.dataset("secret", None),
            },
        }
        config.write_text(to_toml(self.config))
        address = self.config["listen"][0]
        self.daemon = Daemon(config, address, folder / "log", {}, interpreter=interpreter)
        self.daemon.start()
        open_to_everybody(address)
        self.users = [User(uid, address) for uid in (ALICE, BOB)]

    def dataset(self, name: str, allow: list[str] | None) -> Mapping[str, Any]:
        """The table of a dataset."""
        uri = str(self.folder / "data" / f"{name}.bin")
        table = {"uri": uri, "format": "tokens", "dtype": "uint16", "sequence_length": 10}
        return table | ({"allow": allow} if allow else {})

    def audit(self, event: str) -> list[dict[str, Any]]:
        """The lines of the log about an event, once the daemon pauses."""
        before = -1
        while before != (before := self.daemon.log_path.stat().st_size):
            time.sleep(0.3)
        return [line for line in self.daemon.events() if line["event"] == event]

    def status(self) -> pb.DaemonStatus:
        """What an operator sees."""
        with identified_channel(self.daemon.address) as channel:
            return LoaderStub(channel).GetStatus(pb.GetStatusRequest(), timeout=DEADLINE_S)

    def metrics(self) -> str:
        """The metrics, as every user of the machine can read them."""
        (ready,) = [each for each in self.daemon.events() if each["event"] == "ready"]
        url = f"http://{ready['metrics'].removeprefix('tcp:')}/metrics"
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            text: str = answer.read().decode()
        return text


def ref(name: str) -> pb.DatasetRef:
    return pb.DatasetRef(name=name)


def open_request(
    dataset: str = "open", job: str = "train", generation: int = 1, **more: Any
) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(
        dataset=ref(dataset),
        order=pb.OrderSpec(global_batch_size=20),
        reader=pb.Reader(job=job, world_size=1, generation=generation),
        **more,
    )


def close(user: User, opened: pb.SessionOpened) -> None:
    user.call("CloseSession", pb.CloseSessionRequest(session_id=opened.session_id))


def attach(opened: pb.SessionOpened) -> list[pb.StreamRequest]:
    return [
        pb.StreamRequest(attach=pb.Attach(session_id=opened.session_id)),
        pb.StreamRequest(credit=pb.Credit(num_batches=2)),
    ]
