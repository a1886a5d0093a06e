"""Payload frames: the one message on the wire that no protobuf codec touches.

`PayloadChunk { bytes data = 1; }` is the tag 0x0a, the length as a varint, and the data
(https://protobuf.dev/programming-guides/encoding). The data is copied once, straight from gRPC's
buffer to where the batch is assembled.
"""

from gyre_client.errors import DaemonFault

# The daemon sends at most this much of a payload in one message. gRPC's limit for received messages
# is set to the frame: the tag and three bytes of varint come before the data.
MAX_CHUNK_BYTES = 1 << 20
MAX_FRAME_BYTES = MAX_CHUNK_BYTES + 4

_DATA_TAG = 0x0A  # field 1, length-delimited


def chunk_data(frame: bytes) -> memoryview:
    """Returns the data of one payload frame, without a copy.

    Raises:
        DaemonFault: The frame is not a PayloadChunk, or it is longer than `MAX_FRAME_BYTES`.
    """
    view = memoryview(frame)
    if not view:
        return view  # proto3 leaves an empty field out
    length = 0
    for index, byte in enumerate(view[1:5]):
        length |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if view[0] == _DATA_TAG and 2 + index + length == len(view) <= MAX_FRAME_BYTES:
                return view[2 + index :]
            break
    raise DaemonFault(
        f"a payload frame of {len(view)} bytes is not a PayloadChunk: "
        f"it starts with {bytes(view[:6]).hex()}"
    )
