"""The output of notebooks: bars that add up, right words, and user input that never becomes markup."""

from __future__ import annotations

import re
from datetime import timedelta
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makeway import bars, teams, view, words
from makeway_api.bars import bar, scale
from makeway_api.models import Lending, Notice, Offer, Reason, Session, State, Usage, Victim
from makeway_api.tables import aligned
from nbconvert.filters import clean_html
from samples import EVIL, NOW, ago, greedy, job, noticed, offers, preempted, team

GPUS = st.integers(0, 40)
VOID = {"img", "br", "rect", "path"}


class Tags(HTMLParser):
    """Every tag of a piece of HTML; checks that they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def boxes(drawn: str, kind: str) -> list[tuple[float, float]]:
    """Return left edge and width of each box of a kind."""
    bars = re.findall(rf'class="mw-{kind}" style="[^"]*left:([\d.]+)px;[^"]*width:([\d.]+)px', drawn)
    return [(float(left), float(width)) for left, width in bars]


def widths(drawn: str, kind: str) -> float:
    return sum(width for _, width in boxes(drawn, kind))


@pytest.mark.covers("N13")
@given(GPUS, GPUS, GPUS, GPUS, GPUS, st.one_of(st.none(), st.integers(0, 200)))
def test_the_parts_of_a_bar_are_as_wide_as_their_numbers(
    sessions: int, quota: int, borrowed: int, lent: int, free: int, limit: int | None
) -> None:
    used = sessions + quota + borrowed
    shown = bar(
        team(
            guaranteed=sessions, in_quota=quota, borrowed=borrowed, used=used, lent=lent, free=free, limit=limit,
            reserved=sessions + quota + lent + free,
        ),
        200,
    )  # fmt: skip
    per_gpu = scale([shown], bars.WIDTH)
    svg = bars.draw(shown, per_gpu)
    for kind, amount in (
        ("guaranteed", sessions),
        ("in_quota", quota),
        ("borrowed", borrowed),
        ("lent", lent),
        ("free", free),
    ):
        assert widths(svg, kind) == pytest.approx(amount * per_gpu, abs=0.006)
    ((_, end),), ((tick, _),) = boxes(svg, "end"), boxes(svg, "tick")
    assert tick == pytest.approx(shown.reserved * per_gpu, abs=0.006)
    assert end == pytest.approx(shown.end * per_gpu, abs=0.006)
    assert end <= bars.WIDTH + 0.01
    Tags(svg)


def test_bars_of_several_teams_share_one_scale() -> None:
    small, large = bar(team(limit=5), 10), bar(team("devops", limit=10), 10)
    per_gpu = scale([small, large], bars.WIDTH)
    assert per_gpu == bars.WIDTH / 10
    assert widths(bars.draw(small, per_gpu), "in_quota") == widths(bars.draw(large, per_gpu), "in_quota")


def test_an_empty_bar_and_one_of_user_input_are_sound_markup() -> None:
    nothing = bar(team(used=0, guaranteed=0, in_quota=0, lent=0, reserved=0, limit=None))
    Tags(bars.draw(nothing, scale([nothing], bars.WIDTH)))
    evil = bars.draw(bar(team(EVIL, title=EVIL), 10), 1.0)
    assert "<img" not in evil
    assert bar(greedy()).sentence == "RND uses 9 GPUs; reserved 5, limit 9: 3 in quota, 6 borrowed."


def test_a_cluster_that_cannot_be_read_is_said() -> None:
    message = "Nodes and jobs are shown as they were seen last, and nothing starts: the server is away."
    shown = teams.Gpus(offers().model_copy(update={"problem": message}))
    usage = Usage(at=NOW, teams=[team()], total=10, used=4, free=6, virtual=True)
    assert repr(shown).startswith(message)
    for problem in (None, message):
        known = teams.Picture(usage=usage.model_copy(update={"problem": problem}), teams=("rnd",), at=NOW)
        assert (message in teams.live(known)) is (problem is not None)
    assert message in shown._repr_html_()


@pytest.mark.parametrize("message", ["", "saved at step 12; its last save took 5 s", "exit code 1"])
def test_an_attempt_says_once_at_which_step_it_saved(message: str) -> None:
    ended = preempted()
    ended.attempts = [attempt.model_copy(update={"message": message}) for attempt in ended.attempts] * 2
    shown = str(view.job_card(ended, NOW))
    assert shown.count("saved at step 12") == 2
    assert message in shown


def everything_evil() -> list[str]:
    wicked = job(
        name=EVIL, owner=EVIL, team=EVIL, id=EVIL, message=EVIL, profile=EVIL, over_quota=True, borrowed_from=[EVIL],
        attempts=preempted().attempts * 2,
    )  # fmt: skip
    waiting = wicked.model_copy(update={"state": State.PENDING, "reason": Reason(code="reclaiming", message=EVIL)})
    leaving = noticed().model_copy(update={"name": EVIL})
    assert leaving.notice is not None
    leaving.notice.by_team = leaving.notice.by_owner = EVIL
    group = team(EVIL, title=EVIL, lent_to=[Lending(team=EVIL, gpus=1)], borrowed_from=[Lending(team=EVIL, gpus=2)])
    usage = Usage(at=NOW, teams=[group], total=10, used=4, free=6, virtual=True)
    picture = teams.Picture(
        usage=usage, teams=(EVIL,), me=EVIL, mine=(wicked, waiting, leaving), waiting=(waiting,), problem=EVIL, at=NOW
    )  # fmt: skip
    table = offers(Offer(profile=EVIL, team=EVIL, code="ready_now", message=EVIL), teams=(EVIL,), usage=(group,))
    return [
        view.job_card(wicked, NOW), view.jobs_table([wicked, waiting, leaving], NOW), teams.live(picture),
        teams.Gpus(table)._repr_html_(),
    ]  # fmt: skip


@pytest.mark.parametrize("html", everything_evil(), ids=["card", "jobs", "live", "gpus"])
def test_nothing_from_users_becomes_markup(html: str) -> None:
    assert "img" not in Tags(html).seen
    assert "<img" not in html
    assert "script" not in Tags(html).seen


def test_control_characters_never_reach_a_terminal() -> None:
    text = aligned([("A",), (EVIL,)])
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2
    assert "\x1b" not in view.job_text(job(name=EVIL, message=EVIL, state=State.FAILED))


@pytest.mark.parametrize("html", everything_evil(), ids=["card", "jobs", "live", "gpus"])
def test_html_is_complete_by_itself_without_a_style_sheet(html: str) -> None:
    assert "<style" not in html
    assert "<svg" not in html
    assert Tags(html).attributes <= {"class", "style", "dir", "role", "title"} | {
        f"aria-{name}" for name in ("label", "valuemin", "valuemax", "valuenow")
    }


@pytest.mark.parametrize("html", everything_evil(), ids=["card", "jobs", "live", "gpus"])
def test_html_is_still_html_where_nbconvert_sanitizes_it(html: str) -> None:
    """Its sanitizer turns every element that it does not know into visible text, and adds `tbody` to tables."""
    clean = re.sub("&lt;/?tbody&gt;", "", clean_html(html))
    assert "style=" not in clean
    assert re.search(r"&lt;(?!img)", clean) is None
    words_of = re.sub(r"<[^>]+>", "", clean)
    assert re.search(r"[a-z)]free|free[.]?\d", words_of) is None


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (job(), "in quota"),
        (job(over_quota=True, borrowed_from=["devops"]), "over quota, borrowed from DevOps; no checkpoint yet"),
        (job(over_quota=True, borrowed_from=["ml"]), "over quota, borrowed from ml; no checkpoint yet"),
        (preempted(), "rnd uses 9 of its limit of 9 GPUs; this job needs 3."),
        (job(State.SUCCEEDED, message="saved at step 40"), "saved at step 40"),
    ],
)
def test_the_state_of_a_job_is_explained(data: object, text: str) -> None:
    assert view.why(data, NOW) == text  # type: ignore[arg-type]


@pytest.mark.covers("F44")
def test_the_age_of_the_last_checkpoint_is_shown() -> None:
    data = preempted().model_copy(update={"state": State.RUNNING, "over_quota": True})
    assert view.why(data, NOW) == "over quota; last checkpoint: step 12, 1 min 1 s ago"


def test_a_preempted_job_as_text_says_that_it_made_way() -> None:
    text = view.job_text(preempted())
    assert text.startswith("Job j-1 'mnist': waiting again\n")
    assert "made way 1 time" in text
    assert "step 12" in text


@pytest.mark.covers("N14")
def test_banners_for_both_sides_of_a_reclaim() -> None:
    coming = job(
        State.PENDING, name="big", reason=Reason(code="reclaiming", message="3 GPUs of rnd, ready by 12:00:30.")
    )
    notice = Notice(reason="reclaim", by_team="devops", at=NOW, deadline=NOW + timedelta(seconds=30))
    session = Session(
        id="s", user="ana", server="", profile="gpu1", team="rnd", gpus=1, state=State.CHECKPOINTING, phase="running",
        submitted_at=ago(9), notice=notice,
    )  # fmt: skip
    usage = Usage(at=NOW, teams=[team("devops", title="DevOps")], total=10, used=4, free=6)
    html = teams.banners(teams.Picture(usage=usage, mine=(noticed(), coming), sessions=(session,)))
    assert html.count('role="status"') == 3
    assert "Your job mnist makes way for DevOps (bo); it may save until" in html
    assert "GPUs are on their way to your job big: 3 GPUs of rnd" in html
    assert "This notebook has to make way for DevOps: save your work before" in html


@pytest.mark.covers("F37")
def test_borrowing_names_both_teams() -> None:
    devops = team("devops", lent_to=[], borrowed_from=[Lending(team="rnd", gpus=1)])
    alone = team(lent_to=[Lending(team="devops", title="DevOps", gpus=1)])
    assert "RND lends 1 GPU to DevOps" in teams.borrowing([alone])[0], "a team that the reader does not see"
    assert teams.borrowing([team(), devops]) == [
        "RND lends 1 GPU to DEVOPS; RND's jobs within its reservation get them back.",
        "DEVOPS borrows 1 GPU from RND.",
    ]


def test_one_line_says_what_i_can_have_now() -> None:
    gpu4 = Offer(
        profile="gpu4", team="rnd", code="ready_after_reclaim", message="", seconds=30,
        victims=[Victim(id="j", name="x", team="devops", owner="bo", gpus=2)],
    )  # fmt: skip
    listed = [
        Offer(profile=p, team="rnd", code=c, message="") for p, c in (("gpu1", "ready_now"), ("gpu2", "ready_now"))
    ]
    listed += [gpu4, Offer(profile="gpu8", team="rnd", code="waits", message="")]
    assert (
        teams.now_line(offers(*listed))
        == "Now: gpu1 and gpu2 at once, gpu4 within 30 s (jobs on 2 GPUs make way), gpu8 would wait."
    )
    both = offers(listed[0], Offer(profile="gpu1", team="ml", code="refused", message=""), teams=("rnd", "ml"))
    assert teams.now_line(both) == "Now: RND: gpu1 at once; ml: gpu1 is refused."
    assert teams.now_line(offers()) == "Now: no profile is open to you."


def test_machines_of_pools_that_grow_are_told_once_for_all_their_profiles() -> None:
    text = "A machine of type g2 would be started: ready in about 3 min, about 3.10 EUR/h. cloud has 0 of at most 3."
    none = "No machine would be started for it: cloud is paused. cloud has 3 of at most 3 machines."
    comes, no = Reason(code="waiting_for_node", message=text), Reason(code="no_machine", message=none)
    new = [
        Offer(profile=p, team="rnd", code="ready_after_launch", message=text, seconds=s, reason=comes)
        for p, s in (("gpu1", 180), ("gpu2", None))
    ]
    table = offers(*new, Offer(profile="gpu8", team="rnd", code="waits", message=none, reason=no))
    lines = [
        "Now: gpu1 in about 3 min (on a machine), gpu2 once a machine is ready, gpu8 would wait.",
        f"gpu1 and gpu2: {text}",
        f"gpu8: {none}",
    ]
    assert "\n".join(lines) in repr(teams.Gpus(table))
    assert [teams.now_line(table), *teams.machine_lines(table)] == lines
    assert f"gpu1 and gpu2: {text}" in teams.Gpus(table)._repr_html_()


def test_virtual_gpus_are_marked_in_text_and_html() -> None:
    answer = teams.Gpus(offers())
    assert "virtual" in repr(answer)
    assert "virtual GPUs" in answer._repr_html_()


def test_a_user_without_a_team_gets_the_reason() -> None:
    table = offers(teams=()).model_copy(update={"usage": []})
    assert repr(teams.Gpus(table)) == teams.NO_TEAM


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("1h30m", 5400), ("1d", 86400)])
def test_time_limits_are_read_in_seconds(text: str, seconds: int) -> None:
    assert words.seconds(text) == seconds


@pytest.mark.covers("F82")
@pytest.mark.parametrize(
    ("code", "words_before"),
    [
        ("no_free_gpus", "Not before"),
        ("waiting_for_node", "Ready at about"),
        ("no_machine", "The next try is at"),
        ("protected", "Nothing makes way for it before"),
        ("patience", "Nothing makes way for it before"),
    ],
)
def test_a_time_before_which_nothing_happens_says_what(code: str, words_before: str) -> None:
    reason = Reason(code=code, message="It waits.", not_before=ago(-300))
    shown = view.why(job(state=State.PENDING, reason=reason), NOW)
    assert shown.startswith(f"It waits. {words_before} ")
