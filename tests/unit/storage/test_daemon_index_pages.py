"""What counts as a name on the index pages of web servers."""

import pytest
from gyre_daemon.storage.sources.http_source import Page, names_on

NGINX = """<html><head><title>Index of /d/</title></head><body><h1>Index of /d/</h1><hr><pre>
<a href="../">../</a>
<a href="sub%20folder/">sub folder/</a>           28-Nov-2026 23:00       -
<a href="a%2520b.tar">a%20b.tar</a>               28-Nov-2026 23:00    1000
<a href="na%C3%AFve.tar">na&iuml;ve.tar</a>       28-Nov-2026 23:00    1000
</pre><hr></body></html>"""
APACHE = """<table><tr><th><a href="?C=N;O=D">Name</a></th><th><a href="?C=M;O=A">Date</a></th>
<tr><td><a href="/">Parent Directory</a></td></tr>
<tr><td><img src="/icons/folder.gif"> <a href="sub/">sub/</a></td></tr>
<tr><td><A HREF="/d/a.tar">a.tar</A></td><td><a href="http://host/d/b.tar">b.tar</a></td></tr></table>"""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (NGINX, ["a%20b.tar", "na\u00efve.tar", "sub folder/"]),
        (APACHE, ["a.tar", "b.tar", "sub/"]),
        ("", []),
        ('<a href="http://other/d/a.tar">', []),
        ('<a href="https://host:8080/d/a.tar">', []),
        ('<a href="/e/a.tar"><a href="../d/../etc/passwd"><a href="..%2f..%2fetc">', []),
        ('<a href="sub/a.tar"><a href="sub%2Fa.tar"><a href="."><a href="#a"><a>', []),
        ('<a href="http://[bad/a.tar"><a href="javascript:a()"><a href="mailto:a@b">', []),
        ('<a href="a.tar"><a href="./a.tar"><a href="a.tar#top">', ["a.tar"]),
    ],
)
def test_names_on_a_page(text: str, names: list[str]) -> None:
    assert names_on(Page("http://host/d/", 200, text)) == names
