"""Web pages are read as a browser shows them, in time that grows with the page."""

import subprocess
import sys
import time

import pytest

from offload_decode.common.errors import CorpusError
from offload_decode.prefill_jobs.documents import html


def text_of(page: str) -> str:
    return html.read(page).text.strip("\n")


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<table><tr><th>Year<th>Boats<tr><td>1901<td>17</table>", "Year\tBoats\n1901\t17"),
        ("<table><thead><tr><td>a<tbody><tr><td>b<tfoot><tr><td>c</table>", "a\nb\nc"),
        ("<table><tr><td><td>b<tr><td>c<td></table>", "\tb\nc"),
        ("<table><tr><td><p>a</p><p>b</p></td><td>c</td></tr></table>", "a\n\nb\tc"),
        ("<ul><li>a<li>b<ul><li>c</ul><li>d</ul>", "a\nb\nc\nd"),
        ("<dl><dt>a<dd>b<dl><dd>c</dl>d<dt>e</dl>", "a\nb\nc\nd\ne"),
        ("<select><option>a<option>b<optgroup><option>c</select>", "a\nb\nc"),
        ("<p>a<p>b<div>c</div>d", "a\n\nb\n\nc\nd"),
        ("<h1>a<h2>b</h2>c", "a\nb\nc"),
        ("<p>a<b>b</b>  c\n<i>d</i> </p>", "ab c d"),
        ("a<br>b<script>x</script><style>y</style><!-- z --><template>t</template>c", "a\nbc"),
        ("<title>T</title><p>a &amp; b &#xD83D; &#128578;</p>", "T\n\na & b \ufffd \U0001f642"),
        ("<p>x</p><pre>a  b\n  c</pre>", "x\n\na  b\n  c"),
        ("a <img src=b alt='a cat'> c<img alt=''>", "a a cat c"),
        ("<head><title/><script src='x'/></head><p>text</p>", "text"),
        ("", ""),
        ("<!-- -->", ""),
    ],
)
def test_what_stands_apart_stays_apart(page, text):
    assert text_of(page) == text


@pytest.mark.parametrize(
    "hidden",
    [
        "<p hidden>no<p>yes",
        "<p hidden>no<section>yes</section>",
        "<ul><li hidden>no<li>yes</ul>",
        "<ul><li hidden>no<ul><li>no</ul>no<li>yes</ul>",
        "<dl><dt hidden>no<dd>yes<dd hidden>no</dl>",
        "<select><option hidden>no<option>yes</select>",
        "<select><optgroup hidden><option>no<optgroup><option>yes</select>",
        "<table><tr hidden><td>no<td>no<tr><td>yes</table>",
        "<table><tr><td hidden>no<td>yes</table>",
        "<table><thead hidden><tr><td>no<tbody><tr><td>yes</table>",
        "<h1 hidden>no<h2>yes</h2>",
        "<div hidden><p>no<div>no</div>no</div>yes",
        "<br hidden><img hidden alt=no>yes",
        "<embed hidden src=a.mid><source hidden><track hidden><wbr hidden>yes",
        "<button hidden>no<button>yes</button>",
        "<p style='display:none'>no</p>yes",
        "<p style='color: red; DISPLAY : None !important; display: block'>no</p>yes",
        "<p style='display:none;display:block'>yes</p>",
        "<p style='visibility:hidden'>no</p>yes",
        "<dialog>no</dialog><dialog open>yes</dialog>",
        "<p hidden='until-found'>no</p>yes",
    ],
)
def test_what_is_not_displayed_is_left_out_and_no_more(hidden):
    assert text_of(hidden) == "yes"


def test_elements_may_lie_deep_and_the_text_below_is_read():
    depth = 100_000
    code = (
        "import sys; from offload_decode.prefill_jobs.documents.html import read\n"
        "for name in ('div', 'b', 'dl><dd'):\n"
        f"    end = name.split('><')[0]\n"
        f"    page = f'<{{name}}>' * {depth} + 'deep' + f'</{{end}}>' * {depth} + ' after'\n"
        "    assert read(page).text.split() == ['deep', 'after'], name"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


SIZE = 200_000
PIECES = [
    "<a ", "<!--", "<", "</", "&", "<![CDATA[", "<a href=x>y", "<b><p>", "<p>x", "<li>", "<table><tr><td>",
    "<div><p>", "<form>", "<nobr>", "<button>", "<select><option>", "<template>", "<p hidden>", "</p>",
]  # fmt: skip
WORST = {piece: piece * (SIZE // len(piece)) for piece in PIECES} | {
    "names": "<p " + " ".join(f"a{number}" for number in range(SIZE // 7)) + ">",
    "formats": "".join(f"<b id={number}>" for number in range(SIZE // 20)) + "<p>x" * (SIZE // 8),
}


@pytest.mark.parametrize("page", WORST.values(), ids=WORST)
def test_the_worst_pages_take_time_that_grows_with_their_size(page):
    began = time.process_time()
    html.read(page)
    assert time.process_time() - began < 2  # a fifth of a second on a machine of its own


@pytest.mark.parametrize(
    ("start", "end"), [("<b>", "</x>"), ("<div><i>", "</p>"), ("<dd>", "<li></x>"), ("<b>", "</span>")]
)
def test_pages_that_would_take_longer_are_refused(start, end):
    began = time.process_time()
    with pytest.raises(CorpusError, match="too many elements within each other"):
        html.read(start * 50_000 + end * 50_000)
    assert time.process_time() - began < 4


def test_a_page_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(html, "MAX_HTML", 1 << 20)
    with pytest.raises(CorpusError, match="HTML of more than 1 MiB"):
        html.read("x" * (1 << 21))
