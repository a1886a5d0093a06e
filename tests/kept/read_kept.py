"""Reads what cursors of a case say, with the client that is on the path: the kept one or today's.

    python -m tests.kept.read_kept ADDRESS < CASES

writes `{"client": FILE, "batches": {CASE: BATCHES}, "states": {CASE: STATE}}`: the batches of each
step, one of each reader, and the state after them. A batch is its sample ids and a digest of all
its tensors; of a case that is refused, the error. A case with `num_steps` is read for as many.
"""

import base64
import contextlib
import hashlib
import json
import sys
from typing import Any

import gyre_client
import torch
from gyre_client import Loader
from gyre_client.errors import GyreError

Case = dict[str, Any]
Seen = list[list[tuple[list[int], str]]]


def seen(batch: dict[str, torch.Tensor]) -> tuple[list[int], str]:
    """The sample ids of a batch, and a digest of all that it has."""
    hashed = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(batch.items()):
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.contiguous().numpy().tobytes())
    return batch["sample_id"].tolist(), hashed.hexdigest()


def read(address: str, case: Case, num_steps: int) -> tuple[Seen, str]:
    """The next batches of all readers of a case, and the state after them, in base64."""
    with contextlib.ExitStack() as stack:
        loaders = [
            stack.enter_context(
                Loader(case["dataset"], address=address, **case["arguments"], **reader)
            )
            for reader in case["readers"]
        ]
        for loader in loaders:
            if case.get("state"):
                loader.load_state_dict({"cursor": base64.b64decode(case["state"])})
        streams = [loader.stream() for loader in loaders]
        steps = [[seen(next(stream)) for stream in streams] for _ in range(num_steps)]
        states = {base64.b64encode(loader.state_dict()["cursor"]).decode() for loader in loaders}
        (state,) = states  # one on all ranks
        return steps, state


def read_all(address: str, cases: dict[str, Case]) -> dict[str, Any]:
    """What is written; a batch has tuples for JSON's lists."""
    batches: dict[str, Any] = {}
    states: dict[str, str] = {}
    for name, case in cases.items():
        try:
            num_steps = case.get("num_steps", len(case["batches"]))
            batches[name], states[name] = read(address, case, num_steps)
        except GyreError as error:
            batches[name] = str(error)
    return {"client": gyre_client.__file__, "batches": batches, "states": states}


if __name__ == "__main__":
    json.dump(read_all(sys.argv[1], json.load(sys.stdin)), sys.stdout)
