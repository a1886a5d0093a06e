"""Object storage behind TLS, and the URLs that are signed for it."""

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from gyre_daemon.errors import ConfigError, NotAllowed
from gyre_daemon.storage.sources.http_source import PlainSource, take_http_options
from gyre_daemon.storage.sources.object_source import ObjectSource, open_objects

from tests.certificates import Authority, self_signed
from tests.contract.places import Place, Targets, noise, run, unique
from tests.contract.storage.remote_contract import RemoteContract
from tests.object_server.process import ObjectServerProcess, object_server

DATA = noise(0, 1000)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[ObjectServerProcess]:
    pair = authority.sign("server")
    with object_server(tls=(pair.certificate, pair.key)) as process:
        yield process


class SecurePlace(Place):
    def __init__(self, server: ObjectServerProcess, authority: Authority) -> None:
        self.server, self.path = server, f"/storage-{next(unique)}/data"
        self.root = f"s3:/{self.path}"
        self.settings = {**server.storage_settings, "ca_file": str(authority.path)}

    def put(self, name: str, data: bytes) -> None:
        self.server.put(f"{self.path}/{name}", data)

    def delete(self, name: str) -> None:
        self.server.delete(f"{self.path}/{name}")


class TestS3OverTls(RemoteContract):
    @pytest.fixture
    def place(self, server: ObjectServerProcess, authority: Authority) -> SecurePlace:
        return SecurePlace(server, authority)

    def num_gets(self, place: Place) -> int:
        assert isinstance(place, SecurePlace)
        by_path = place.server.counts()["by_path"]
        return sum(count for path, count in by_path.items() if path.startswith(place.path))

    def test_it_is_our_client_that_reads(self, place: SecurePlace, opener: Any) -> None:
        place.put("0.bin", DATA)

        async def scene() -> None:
            storage = await opener(place.root, place.settings)
            assert isinstance(storage._credentials.source, PlainSource)

        run(scene())

    @pytest.mark.parametrize("fault", ["unknown", "expired", "of another host"])
    def test_a_certificate_that_is_not_trusted(
        self, place: SecurePlace, opener: Any, tmp_path: Path, fault: str
    ) -> None:
        other = Authority(tmp_path)
        host, days = "127.0.0.2" if fault == "of another host" else "127.0.0.1", 1
        pair = other.sign("server", host=host, days=-1 if fault == "expired" else days)
        with object_server(tls=(pair.certificate, pair.key)) as process:
            process.put("/b/0.bin", DATA)
            roots = place.settings["ca_file"] if fault == "unknown" else str(other.path)
            settings = {**process.storage_settings, "ca_file": roots}
            told = r"certificate of the server is not trusted \(\w+\); .*`ca_file`"
            with pytest.raises(NotAllowed, match=told):
                run(opener("s3://b/0.bin", settings))

    def test_a_self_signed_certificate_of_an_authority(self, opener: Any, tmp_path: Path) -> None:
        """As `openssl req -x509` makes it by itself."""
        pair = self_signed(tmp_path, is_authority=True)
        with object_server(tls=(pair.certificate, pair.key)) as process:
            process.put("/b/0.bin", DATA)
            settings = {**process.storage_settings, "ca_file": str(pair.certificate)}
            for name in ("", "/0.bin"):
                with pytest.raises(NotAllowed, match=r"is that of an authority.*CA:FALSE"):
                    run(opener(f"s3://b{name}", settings))

    @pytest.mark.parametrize("general", [False, True], ids=["our client", "obstore"])
    @pytest.mark.parametrize("rest", ["", "/0.bin"])
    def test_a_self_signed_certificate_that_is_named(
        self, opener: Any, tmp_path: Path, general: bool, rest: str
    ) -> None:
        """The file has a comment that is not ASCII."""
        pair = self_signed(tmp_path, is_authority=False)
        roots = tmp_path / "roots.pem"
        roots.write_bytes("# Schlüssel\n".encode() + pair.certificate.read_bytes())
        with object_server(tls=(pair.certificate, pair.key)) as process:
            process.put("/b/x/0.bin", DATA)
            process.put("/b/x/1.bin", DATA[::-1])
            settings = {**process.storage_settings, "ca_file": str(roots)}
            settings |= {"unsigned_payload": "true"} if general else {}

            async def scene() -> None:
                storage = await opener(f"s3://b/x{rest}", settings)
                targets = Targets()
                for shard in range(len(storage.shards)):
                    targets.add(shard, 100, 300)
                await storage.read(targets.reads())
                targets.check([DATA, DATA[::-1]])

            run(scene())
            other = Authority(tmp_path / "other")
            with pytest.raises(NotAllowed, match="not trusted"):
                run(opener(f"s3://b/x{rest}", {**settings, "ca_file": str(other.path)}))

    def test_a_proxy(
        self, place: SecurePlace, opener: Any, proxy: "Proxy", monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("https_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        place.put("0.bin", DATA)
        targets = Targets().add(0, 100, 500)

        async def scene() -> None:
            await (await opener(place.root, place.settings)).read(targets.reads())

        run(scene())
        targets.check([DATA])
        assert set(proxy.targets) == {place.server.url.removeprefix("https://")}


@pytest.mark.parametrize("content", [None, b"", b"no certificate", b"\xff\xfe", "folder"])
def test_a_file_of_roots_that_is_none(tmp_path: Path, content: bytes | str | None) -> None:
    file = tmp_path / "roots.pem"
    if content == "folder":
        file.mkdir()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"ca_file .*roots\.pem.* cannot be used"):
        take_http_options({"ca_file": str(file)})


def test_roots_must_be_a_path() -> None:
    with pytest.raises(ConfigError, match="ca_file must be the path"):
        take_http_options({"ca_file": 3})


@pytest.fixture
def proxy() -> Iterator["Proxy"]:
    proxy = Proxy()
    yield proxy
    proxy.close()


class Proxy:
    """Tunnels what it is asked to `CONNECT` to.

    Attributes:
        url: where it listens.
        targets: where the tunnels led.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.targets: list[str] = []
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += client.recv(1)
                target = head.split()[1].decode()
                self.targets.append(target)
                host, port = target.split(":")
                server = socket.create_connection((host, int(port)))
                self._sockets.append(server)
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                for pair in ((client, server), (server, client)):
                    self._threads.append(threading.Thread(target=self._carry, args=pair))
                    self._threads[-1].start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)


@contextlib.contextmanager
def answering(
    answer: bytes, context: ssl.SSLContext | None = None
) -> Iterator[tuple[str, list[bytes]]]:
    """A server that takes one request: its host, and the request once it has come."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            if context:
                connection = context.wrap_socket(connection, server_side=True)
            with connection:
                requests.append(connection.recv(1 << 16))
                connection.sendall(b"HTTP/1.1 200 OK\r\n" + answer)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", requests
        server.join()


def test_who_requests_may_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signed URL cannot say so: obstore reads, and signs each request as botocore does."""
    modified = b"Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n"
    with answering(b"Content-Length: 5\r\n" + modified + b"\r\n") as (host, requests):
        settings = {**CREDENTIALS, "endpoint": f"http://{host}", "request_payer": "true"}
        filesystem = open_objects("s3", settings, "s3://bucket/data/a.bin", max_retries=0)
        assert run(filesystem._info("s3://bucket/data/a.bin"))["size"] == 5
    lines = requests[0].decode().split("\r\n")
    sent = dict(line.split(": ", 1) for line in lines[1:] if line)
    assert sent["x-amz-request-payer"] == "requester"
    at = datetime.datetime.strptime(sent["x-amz-date"], "%Y%m%dT%H%M%SZ")
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_: at)
    payer = {"x-amz-request-payer": "requester"}
    request = AWSRequest("HEAD", f"http://{host}/bucket/data/a.bin", payer)
    credentials = Credentials(CREDENTIALS["access_key_id"], CREDENTIALS["secret_access_key"])
    botocore.auth.S3SigV4Auth(credentials, "s3", CREDENTIALS["region"]).add_auth(request)
    assert request.headers["Authorization"] == sent["authorization"]


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
def test_an_endpoint_of_the_environment_may_be_plain_http(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with answering(
        b"Content-Length: 5\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n"
    ) as (
        host,
        requests,
    ):
        monkeypatch.setenv(name, f"http://{host}")
        filesystem = open_objects("s3", CREDENTIALS, "s3://bucket/data/a.bin", max_retries=0)
        assert run(filesystem._info("s3://bucket/data/a.bin"))["size"] == 5
    assert requests[0].startswith(b"HEAD /bucket/data/a.bin ")


def test_credentials_of_a_role_come_from_sts(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token of a pod is exchanged for them, and they sign as botocore's do."""
    (tmp_path / "token").write_text("of-a-pod")
    told = (
        b"<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
        b"<AccessKeyId>AKIDROLE</AccessKeyId><SecretAccessKey>of the role</SecretAccessKey>"
        b"<SessionToken>session/of+STS</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>"
        b"</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    )
    url = "s3://bucket/data/a.bin"
    pair, roots = authority.sign("server"), authority.path.read_text()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    told = b"Content-Length: %d\r\n\r\n%s" % (len(told), told)
    with answering(told, context) as (host, requests):
        settings = {
            "endpoint": "https://storage.example.org:9000",
            "region": "eu-west-3",
            "role_arn": "arn:aws:iam::1:role/reader",
            "role_session_name": "gyre",
            "web_identity_token_file": str(tmp_path / "token"),
            "aws_endpoint_url_sts": f"https://{host}",
        }
        signed = urlsplit(run(ObjectSource("s3", settings, url, roots).signed_url(url)))
    asked = parse_qs(urlsplit(requests[0].decode().split(" ")[1]).query)
    assert asked["Action"] == ["AssumeRoleWithWebIdentity"]
    assert asked["RoleArn"] == [settings["role_arn"]]
    assert asked["RoleSessionName"] == ["gyre"]
    assert asked["WebIdentityToken"] == ["of-a-pod"]
    credentials = Credentials("AKIDROLE", "of the role", "session/of+STS")
    assert parse_qs(signed.query) == signed_by_botocore(signed, credentials, monkeypatch)


def test_a_setting_on_which_obstore_panics() -> None:
    with pytest.raises(ConfigError, match=r"cannot be used: obstore fails with Expected config"):
        open_objects("s3", {**CREDENTIALS, "allow_http": "true"}, "s3://bucket/data/a.bin")


def signed_by_botocore(
    signed: SplitResult, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[str]]:
    """The query of a signed URL as botocore makes it for the same time."""
    query = parse_qs(signed.query)
    at = datetime.datetime.strptime(query["X-Amz-Date"][0], "%Y%m%dT%H%M%SZ")
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_: at)
    request = AWSRequest("GET", f"{signed.scheme}://{signed.netloc}{signed.path}")
    expires_s = int(query["X-Amz-Expires"][0])
    botocore.auth.S3SigV4QueryAuth(credentials, "s3", "eu-west-3", expires_s).add_auth(request)
    return parse_qs(urlsplit(request.url).query)


CREDENTIALS = {
    "region": "eu-west-3",
    "access_key_id": "AKIDEXAMPLE",
    "secret_access_key": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
}
KEYS = ("data/a.bin", "data/a b+c~d/é#?.bin", "data/%41&=;.bin")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("token", [None, "session/token+of=STS"])
@pytest.mark.parametrize("style", ["path", "virtual-hosted"])
def test_signatures_are_those_of_botocore(
    key: str, token: str | None, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = "https://storage.example.org:9000"
    if style == "virtual-hosted":
        endpoint = endpoint.replace("storage", "bucket.storage")
    settings = {
        "endpoint": endpoint,
        **CREDENTIALS,
        "virtual_hosted_style_request": str(style == "virtual-hosted").lower(),
        **({"session_token": token} if token else {}),
    }

    async def sign() -> str:
        return await ObjectSource("s3", settings, f"s3://bucket/{key}").signed_url(
            f"s3://bucket/{key}"
        )

    signed = urlsplit(run(sign()))
    credentials = Credentials(settings["access_key_id"], settings["secret_access_key"], token)
    assert parse_qs(signed.query) == signed_by_botocore(signed, credentials, monkeypatch)
    assert signed.netloc == urlsplit(endpoint).netloc
    assert signed.path.startswith("/data/" if style == "virtual-hosted" else "/bucket/data/")
