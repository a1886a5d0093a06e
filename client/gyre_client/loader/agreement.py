"""Whether all ranks of a run read the same samples in the same order."""

import json
import logging
import socket
from collections.abc import Mapping

from google.protobuf.json_format import MessageToDict
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import CursorRejected
from gyre_client.targets.private_folder import temporary_folder
from gyre_client.targets.run import agreed, machine

_log = logging.getLogger("gyre_client")
_WHAT_DIFFERS = {
    "fingerprint": "the data differ. Copy the same shards to both nodes",
    "order_version": "their daemons order samples differently. Install one version of gyred",
    "transforms": "the transforms differ. Declare the same ones on both nodes",
}
_OTHER_ARGUMENT = (
    "this argument differs. Pass the same on all ranks; a Loader of some ranks only needs rank= "
    "and world_size="
)
_NAMES = {"global_batch_size": "batch_size", "mode": "order"}  # of arguments, by those of fields


def arguments_that_agree(request: pb.OpenSessionRequest, num_epochs: int | None) -> dict[str, str]:
    """Returns the arguments that all ranks must have in common, by their names in a Loader."""
    order = MessageToDict(
        request.order,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )
    told = {_NAMES.get(name, name): str(value) for name, value in order.items()}
    told["pack"] = str(MessageToDict(request.dataset.pack))
    told["weights"] = str(sorted(request.weights.items()))
    told["skip_steps"] = str(MessageToDict(request.skip_steps))
    return told | {"epochs": str(num_epochs)}


class Agreement:
    """Compares the first sessions of the ranks of a run.

    The first rank writes its session into the store of the process group, and each other rank
    compares: no rank waits for another one.
    """

    def __init__(
        self, key: str, rank: int, arguments: Mapping[str, str], *, is_private: bool
    ) -> None:
        """Compares nothing yet.

        Args:
            key: Tells this loader from the rank's others; "" to compare nothing.
            rank: The rank of this process.
            arguments: See `arguments_that_agree`.
            is_private: Whether a private daemon serves.
        """
        self._key = key
        self._rank = rank
        self._arguments = arguments
        self._is_private = is_private

    def check(self, opened: pb.SessionOpened) -> None:
        """Compares the first session with those of the other ranks; does nothing later.

        Raises:
            CursorRejected: Another rank is served other samples; the message names the nodes.
        """
        if not self._key:
            return
        who = f"rank {self._rank} on node {socket.gethostname()}"
        mine = {name: getattr(opened, name) for name in _WHAT_DIFFERS} | dict(self._arguments)
        theirs = json.loads(agreed(f"dataset/{self._key}", json.dumps(mine | {"who": who})))
        other = theirs.pop("who")
        for name in mine | theirs:
            here, there = mine.get(name, ""), theirs.get(name, "")
            if here != there:
                advice = _WHAT_DIFFERS.get(name, _OTHER_ARGUMENT)
                raise CursorRejected(
                    f"{who} and {other} would train on different samples: {advice} "
                    f"({name} {here!r:.100} and {there!r:.100})",
                    {"differs": name},
                )
        self._key = ""
        if self._is_private:
            self._look_for_others(who)

    def _look_for_others(self, who: str) -> None:
        """Warns where ranks on one machine cannot share a private daemon."""
        folder = temporary_folder()
        found = folder.stat()
        mine = json.dumps([f"{found.st_dev}:{found.st_ino}", who])
        place, other = json.loads(agreed(f"folder/{machine()}", mine))
        if place != json.loads(mine)[0]:
            _log.warning(
                "%s and %s are on one machine and have a private daemon each: they have no folder "
                "for temporary files in common (got %s). Mount one in all containers and name it "
                "in TMPDIR, or run one gyred per node and set GYRE_ADDRESS",
                who,
                other,
                folder,
            )
