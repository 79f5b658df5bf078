"""The HTML report showed the backticks of texts that are written for Markdown, such as the decision's."""

from tasks.pages import as_code, page_templates

REASON = "not better than <b>version</b> 3: `starling promote a&b --force` makes it champion nevertheless"
SHOWN = (
    "not better than &lt;b&gt;version&lt;/b&gt; 3: <code>starling promote a&amp;b --force</code> makes it champion "
    "nevertheless"
)


def test_what_is_in_backticks_is_code_and_everything_is_escaped():
    assert as_code(REASON) == SHOWN
    assert as_code("`a` or `b`") == "<code>a</code> or <code>b</code>"
    for plain in ("", "a ` b", "``", "`a\nb`"):
        assert as_code(plain) == plain


def test_report_shows_the_decision_with_code():
    pages = page_templates()
    decision = {"reason": REASON, "sets": {"test": {"champion_wer": 0.1, "challenger_wer": 0.2, "words": 9}}}
    page = pages.get_template("champion.html").render(decision=decision | {"changed": {}, "champion": "3"}, changes=[])
    assert SHOWN in page
    facts = '{% from "tables.html" import table %}{{ table(["", ""], facts.items()) }}'
    page = pages.from_string(facts).render(facts={"decision": as_code(REASON), "model": "`<x>`"})
    assert f"<td>{SHOWN}</td>" in page
    assert "<td>`&lt;x&gt;`</td>" in page
