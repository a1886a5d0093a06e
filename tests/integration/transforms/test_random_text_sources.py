"""Texts that sources of a mixture cut at random: caches, filters, replaced samples and packing."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import CorruptSample

from tests.batches import Batch, same, take
from tests.conftest import Daemon, StartDaemon
from tests.drawn import cropped, source_seed
from tests.packing import check_packed

SEED, BATCH, KEPT, BAD = 7, 8, 9, 5
TEXTS = [
    f"{number:02d}:" + "abcdefghijklmnopqrstuvwxyz"[: 9 * (number % 4)] for number in range(24)
]
LEFT = [number for number, text in enumerate(TEXTS) if len(text) > 3]  # by the filter
LINES = [number for number in range(24) if number != BAD]
TOKENIZE = {"name": "tokenize", "field": "json", "key": "text", "tokenizer": "bytes"}
CUT = {"name": "truncate", "field": "tokens", "length": KEPT, "start": "random"}


@pytest.fixture
def daemon(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    """Serves `texts` of `lines`, of which one is replaced, and `longer`, which a filter leaves."""
    documents: list[dict[str, Any]] = [{"text": text} for text in TEXTS]
    for name in ("lines", "longer"):
        (tmp_path / name).mkdir()
        documents[BAD] = {"other": 1} if name == "lines" else {"text": TEXTS[BAD]}
        text = "".join(json.dumps(each) + "\n" for each in documents)
        (tmp_path / name / "a.jsonl").write_text(text)
    lines = {
        "uri": str(tmp_path / "lines"),
        "on_corrupt": "replace",
        "max_corrupt": 2,
        "transforms": [TOKENIZE, {"name": "cache"}, CUT],
    }
    longer = {
        "uri": str(tmp_path / "longer"),
        "filter": "length(tokens) > 3",
        "transforms": [TOKENIZE, CUT],
    }
    bad = {"uri": str(tmp_path / "lines"), "transforms": [TOKENIZE, CUT]}
    return gyred(
        {
            "cache_memory": "16 MiB",
            "report_dir": str(tmp_path / "reports"),
            "datasets": {"lines": lines, "longer": longer, "bad": bad},
            "mixtures": {
                "texts": {"weights": {"lines": 1, "longer": 1}, "block": 8},
                "with_bad": {"weights": {"bad": 1, "longer": 1}, "block": 8},
            },
        }
    )


def loader(daemon: Daemon, name: str = "texts", **keys: Any) -> Loader:
    values = {"batch_size": BATCH, "seed": SEED, **keys}
    return Loader(name, address=daemon.address, **values)


def expected(document: int, epoch: int) -> list[int]:
    """What the source makes of a document of the mixture in one of its epochs."""
    name, number, own = "lines", document, document
    if document >= len(TEXTS):
        name, own = "longer", document - len(TEXTS)
        number = LEFT[own]
    whole = np.frombuffer(TEXTS[number].encode(), np.uint8)
    kept = whole
    if len(whole) > KEPT:
        kept = cropped(whole, KEPT, source_seed(SEED, name), epoch, own)
    found: list[int] = kept.tolist()
    return found


def rows(batch: Batch) -> list[tuple[int, list[int]]]:
    bounds = batch["tokens.offsets"].tolist()
    return [
        (sample, batch["tokens"][bounds[row] : bounds[row + 1]].tolist())
        for row, sample in enumerate(batch["sample_id"].tolist())
    ]


def test_caches_filters_and_replaced_samples_keep_working(daemon: Daemon) -> None:
    with loader(daemon) as alone:
        whole = take(alone, 18)
        state = alone.state_dict()
        following = take(alone, 2)
    place: Counter[bool] = Counter()
    for batch in whole:
        for document, tokens in rows(batch):
            is_longer = document >= len(TEXTS)
            assert document != BAD
            # an epoch has as many positions as the source has samples, replaced ones too
            epoch = place[is_longer] // (len(LEFT) if is_longer else len(TEXTS))
            assert tokens == expected(document, epoch)
            place[is_longer] += 1
    daemon.kill()
    daemon.restart()
    with loader(daemon) as resumed:
        resumed.load_state_dict(state)
        assert same(take(resumed, 2), following)
    with pytest.raises(CorruptSample, match=r"of dataset `bad` .*cannot be transformed: tokenize"):
        take(loader(daemon, "with_bad"), 1)


def test_documents_are_packed_as_they_are_drawn(daemon: Daemon) -> None:
    pack = {"field": "tokens", "length": 24}
    with loader(daemon, pack=pack) as alone:
        whole = take(alone, 12)
    seen: Counter[int] = Counter()
    for batch in whole:
        parts = iter(check_packed(batch, "tokens", 0))
        counts = batch["document_id.offsets"].diff().tolist()
        for sequence, count in zip(batch["sample_id"].tolist(), counts, strict=True):
            for document, tokens in islice(parts, count):
                assert tokens.tolist() == expected(document, seen[sequence])
            seen[sequence] += 1
    assert max(seen.values()) > 3
    ranks = [loader(daemon, pack=pack, rank=rank, world_size=2) for rank in range(2)]
    with ranks[0] as first, ranks[1] as second:
        for batch in whole[:4]:
            halves = [next(first), next(second)]
            for name in ("tokens", "sample_id"):
                found = [row for half in halves for row in half[name].tolist()]
                assert found == batch[name].tolist()
