import pytest
from gyre_client.errors import InvalidRequest
from gyre_client.transport.channel import MAX_SOCKET_PATH_BYTES, parse_address


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("unix:/run/gyre/gyre.sock", "unix:/run/gyre/gyre.sock"),
        ("unix:/tmp/a b%20/gyre.sock", "unix:/tmp/a%20b%2520/gyre.sock"),
        ("tcp:localhost:7000", "dns:///localhost:7000"),
        ("tcp:127.0.0.1:65535", "dns:///127.0.0.1:65535"),
        ("tcp:[::1]:1", "dns:///[::1]:1"),
    ],
)
def test_the_two_forms(text: str, target: str) -> None:
    address = parse_address(text)
    assert address.text == text
    assert address.target == target


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "none of unix:, tcp: and tls:"),
        ("localhost:7000", "none of unix:, tcp: and tls:"),
        ("/run/gyre.sock", "none of unix:, tcp: and tls:"),
        ("http://localhost", "none of unix:, tcp: and tls:"),
        ("unix:", "not absolute"),
        ("unix:gyre.sock", "not absolute"),
        ("unix:/a\0b", "NUL"),
        ("unix:/" + "é" * 60, "121 bytes"),
        ("tcp:", "no host and port"),
        ("tcp:localhost", "no host and port"),
        ("tcp::7000", "no host and port"),
        ("tcp:::1:7000", "brackets"),
        ("tcp:localhost:", "port"),
        ("tcp:localhost:http", "port"),
        ("tcp:localhost:0", "port"),
        ("tcp:localhost:65536", "port"),
        ("tcp:localhost:-1", "port"),
        ("tcp:localhost:\u0663", "port"),
    ],
)
def test_everything_else_is_refused_in_one_sentence(text: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        parse_address(text)
    assert "\n" not in str(caught.value)


def test_the_longest_socket_path_is_accepted() -> None:
    path = "/" + "x" * (MAX_SOCKET_PATH_BYTES - 1)
    assert parse_address(f"unix:{path}").target == f"unix:{path}"
