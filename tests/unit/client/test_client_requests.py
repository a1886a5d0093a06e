from pathlib import Path

import pytest
from gyre_client.display import plain
from gyre_client.errors import DaemonFault, InvalidRequest
from gyre_client.transport.arguments import TAILS, choice, dataset_ref, option_value
from gyre_client.transport.channel import MAX_CHUNK_BYTES, chunk_data
from gyre_daemon.service.requests import to_ad_hoc
from gyre_protos.v1 import loader_pb2 as pb


@pytest.mark.parametrize("num_bytes", [0, 1, 127, 128, 129, 16383, 16384, 1000000, MAX_CHUNK_BYTES])
def test_a_frame_is_what_protobuf_writes(num_bytes: int) -> None:
    data = bytes(range(256)) * (num_bytes // 256 + 1)
    frame = pb.PayloadChunk(data=data[:num_bytes]).SerializeToString()
    assert chunk_data(frame) == data[:num_bytes]


@pytest.mark.parametrize(
    "frame",
    [
        b"\x0a",  # no length
        b"\x0a\x02a",  # too short
        b"\x0a\x01ab",  # too long
        b"\x12\x01a",  # another field
        b"\x08\x01",  # a number
        b"\x0a\x80\x80\x80\x80\x01a",  # an endless length
        b"\x0a\x01a\x0a\x01b",  # the field twice
        pb.PayloadChunk(data=bytes(MAX_CHUNK_BYTES + 1)).SerializeToString(),
    ],
)
def test_a_frame_that_is_no_chunk_is_refused(frame: bytes) -> None:
    with pytest.raises(DaemonFault, match="not a PayloadChunk"):
        chunk_data(frame)


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        0,
        -7,
        2**63 - 1,
        -(2**63),
        1.5,
        -1e300,
        float("inf"),
        "",
        "uint16",
        'a "quoted" \\ line\nand \t\x7f\x01 more',
        "naïve \U0001f600",
        ["json", "txt"],
        [[1, 2], []],
        {"a key": 1, "b": {"c": [True]}},
    ],
)
def test_an_option_reaches_the_daemon_as_it_is(value: object) -> None:
    ad_hoc = dataset_ref("/data", "tokens", {"key": value}).ad_hoc
    received = to_ad_hoc(pb.AdHocDataset.FromString(ad_hoc.SerializeToString()))
    assert received.options == {"key": value}
    assert type(received.options["key"]) is type(value)


@pytest.mark.parametrize("value", [None, b"bytes", object(), ["fine", None], 2**63, "\ud800"])
def test_option_values_that_the_protocol_lacks_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="option value"):
        option_value(value)


def test_a_dataset_is_a_name_or_a_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dataset_ref("wiki") == pb.DatasetRef(name="wiki")
    ad_hoc = dataset_ref(Path("data.bin"), "tokens", {"dtype": "uint8"}).ad_hoc
    assert ad_hoc == pb.AdHocDataset(
        uri=str(tmp_path / "data.bin"),
        format="tokens",
        options={"dtype": pb.OptionValue(text="uint8")},
    )
    assert dataset_ref("s3://bucket/x.tar", "webdataset").ad_hoc.uri == "s3://bucket/x.tar"
    with pytest.raises(InvalidRequest, match="empty"):
        dataset_ref("")
    with pytest.raises(InvalidRequest, match=r"\(dtype\) need a path, a URI or a format"):
        dataset_ref("wiki", None, {"dtype": "uint8"})
    assert dataset_ref("./data").ad_hoc == pb.AdHocDataset(uri=str(tmp_path / "data"))
    assert dataset_ref(Path("data")).ad_hoc == pb.AdHocDataset(uri=str(tmp_path / "data"))
    assert dataset_ref("~/data").ad_hoc.uri == str(Path.home() / "data")
    assert dataset_ref("zip::/data/x.zip").ad_hoc.uri == "zip::/data/x.zip"
    assert dataset_ref("s3://bucket/", None, {"columns": []}).ad_hoc.format == ""


def test_a_choice_is_one_of_the_protocols_values() -> None:
    assert [choice("tail", tail, TAILS) for tail in ("wrap", "drop", "pad")] == [
        pb.TAIL_WRAP,
        pb.TAIL_DROP,
        pb.TAIL_PAD,
    ]
    with pytest.raises(InvalidRequest, match="tail is 'keep'; it can be 'wrap', 'drop', 'pad'"):
        choice("tail", "keep", TAILS)


def test_plain_values_keep_integers_defaults_and_nesting() -> None:
    state = pb.SessionState(handle="s", reader=pb.Reader(job="j", generation=2**63), attached=True)
    status = plain(pb.DaemonStatus(pid=7, sessions=[state]))
    assert status["pid"] == 7
    assert status["draining"] is False
    assert status["storage"] == []
    assert status["sessions"][0]["reader"] == {
        "job": "j",
        "rank": 0,
        "world_size": 0,
        "generation": 2**63,
        "peer": None,
        "fence": "",
        "num_local": 0,
    }
    assert plain(pb.SessionState())["reader"] is None
    assert plain(pb.PlanStepResponse(sample_ids=[3, 1], mask=[True]))["sample_ids"] == [3, 1]


def test_a_home_folder_that_does_not_exist_is_told() -> None:
    with pytest.raises(InvalidRequest, match="begins with `~`, and there is no such home folder"):
        dataset_ref("~nobody-has-this-name/data", None, None)
