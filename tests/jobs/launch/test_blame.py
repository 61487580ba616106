"""Who is blamed, by what is known of all ranks."""

from __future__ import annotations

from tfpar.jobs.launch.beacon import TaskProgress
from tfpar.jobs.launch.blame import Cause, Limits, RankStatus, blame, must_end
from tfpar.jobs.launch.processes import Exit
from tfpar.jobs.launch.report import headline, report
from tfpar.jobs.launch.supervisor import Failure, Signs

NOW = 1000.0
LIMITS = Limits(timeout_s=60, start_timeout_s=20)


def signs(activity="train step 17", since=990.0, **fields) -> Signs:
    known = {"connected_at": 900.0, "heard_at": NOW - 1, "bounded": True, **fields}
    return Signs(activity=activity, since=since, **known)


def rank(number, code=None, at=995.0, remote=False, stopped=False, of=None) -> RankStatus:
    ended = None if code is None else Exit(code, at)
    return RankStatus(number, "h", remote, ended, stopped, of)


def raised(kind, at, **fields) -> Signs:
    return signs(failure=Failure(kind, f"{kind} of its own", at), **fields)


def hung(activity="train step 17", **fields) -> Signs:
    return signs(activity, since=930.0, hung_after=60.0, **fields)


def culprits(*records: RankStatus) -> list[tuple[int, Cause]]:
    assert must_end(records, LIMITS, NOW)
    return [(b.record.rank, b.cause) for b in blame(records, LIMITS, NOW)]


def test_the_stages_of_a_pipeline_are_told():
    records = [rank(0, of=signs(stages=(0, 3))), rank(1, -9, of=signs(stages=(1,)))]
    text = report(blame(records, LIMITS, NOW), records, NOW)
    assert "rank 1 (host h, stage 1) was killed by SIGKILL at train step 17" in text
    assert "  0     h     train step 17  0, 3   10.0 s  still running" in text
    plain = [rank(0, of=signs()), rank(1, -9, of=signs())]
    assert "stage" not in report(blame(plain, LIMITS, NOW), plain, NOW)


def test_the_task_of_a_pipeline_is_told():
    waiting = signs(stages=(0,), reached=TaskProgress("0B3", "waits"))
    killed = signs(stages=(1,), reached=TaskProgress("1B3", "runs"))
    records = [rank(0, of=waiting), rank(1, -9, of=killed)]
    text = report(blame(records, LIMITS, NOW), records, NOW)
    assert "SIGKILL at train step 17, in the backward pass of microbatch 3 (1B3).\n" in text
    assert "  0     h     train step 17  0      0B3 (waits)  10.0 s  still running" in text
    told = headline(blame([records[1], rank(1, -9, of=waiting)], LIMITS, NOW)[1:])
    assert "waiting for what the backward pass of microbatch 3 (0B3) reads." in told
    through = rank(0, -9, of=signs(reached=TaskProgress("0W7", "done")))
    told = headline(blame([through], LIMITS, NOW))
    assert "after its last task, the backward pass for weights of microbatch 7 (0W7)." in told


def test_of_ranks_in_one_step_those_that_run_a_task_are_blamed():
    states = ("waits", "done", "waits", "runs")
    records = [rank(n, 70, of=hung(reached=TaskProgress("1B2", s))) for n, s in enumerate(states)]
    assert culprits(*records) == [(3, Cause.HUNG)]
    all_run = [rank(n, 70, of=hung(reached=TaskProgress("1B2", "runs"))) for n in (0, 1)]
    assert len(culprits(*all_run)) == 2


def test_ranks_that_abort_when_hung_ones_end_are_not_blamed():
    reached = [
        TaskProgress("0B3", "done"),
        TaskProgress("0B2", "waits"),
        TaskProgress("1B2", "runs"),
    ]
    records = [
        rank(0, -6, of=signs(reached=reached[0])),
        rank(1, 70, of=hung(reached=reached[1])),
        rank(2, 70, of=hung(reached=reached[2])),
    ]
    assert culprits(*records) == [(2, Cause.HUNG)]
    alone = rank(0, -6, of=signs(reached=reached[0]))
    assert culprits(alone, rank(1, of=signs())) == [(0, Cause.KILLED)]
    assert culprits(rank(3, -9, of=signs()), *records)[0] == (3, Cause.KILLED)


def test_all_is_well_while_ranks_run_or_have_ended_well():
    for records in (
        [rank(0, of=signs()), rank(1, of=signs("reading data"))],
        [rank(0, 0), rank(1, of=signs())],
        [rank(0, of=signs()), rank(1, of=raised("error", 995.0))],  # it may be caught
        [rank(0, of=signs(lost_at=NOW - 1))],
    ):
        assert not must_end(records, LIMITS, NOW)


def test_the_first_that_failed_by_itself_is_blamed():
    assert culprits(rank(0, 1, at=992), rank(1, -9, at=991)) == [
        (1, Cause.KILLED),
        (0, Cause.EXITED),
    ]


def test_a_consequence_is_not_blamed_though_it_ended_first():
    peer = rank(0, 1, at=991, of=raised("peer", 990.9))
    assert culprits(peer, rank(1, 1, at=999, of=raised("error", 990.5))) == [(1, Cause.RAISED)]
    assert culprits(peer, rank(1, of=raised("error", 990.5))) == [(1, Cause.RAISED)]
    assert culprits(peer, rank(1, -11, at=999, of=signs())) == [(1, Cause.KILLED)]


def test_an_abort_may_be_a_consequence_of_an_end_that_is_seen_later():
    records = [rank(0, -6, at=991, of=signs()), rank(1, 3, at=992, of=signs())]
    assert culprits(*records) == [(1, Cause.EXITED), (0, Cause.KILLED)]
    assert culprits(rank(0, -6, of=signs()), rank(1, of=signs())) == [(0, Cause.KILLED)]


def test_ranks_that_are_lost_alike_are_told_together():
    records = [rank(0, -6, of=signs()), rank(1, -9, of=signs()), rank(2, -9, of=signs())]
    told = headline(blame(records, LIMITS, NOW))
    assert told.endswith("SIGKILL at train step 17. The same holds for rank 2.")


def test_an_exception_that_a_rank_got_over_is_not_its_failure():
    got_over = raised("error", at=980.0, since=990.0)
    assert culprits(rank(0, of=got_over), rank(1, 3, of=signs())) == [(1, Cause.EXITED)]


def test_with_nothing_but_consequences_the_first_is_named():
    records = [rank(0, 1, of=raised("peer", 992.0)), rank(1, of=raised("peer", 991.0))]
    assert culprits(*records) == [(1, Cause.PEER)]


def test_who_left_early_is_blamed_for_what_others_wait_in_vain():
    assert culprits(rank(0, 70, of=hung()), rank(1, 0, of=signs())) == [(1, Cause.LEFT_EARLY)]
    assert culprits(rank(0, 1, of=raised("peer", 990.0)), rank(1, 0)) == [(1, Cause.LEFT_EARLY)]
    assert culprits(rank(0, of=signs(since=900)), rank(1, 0, at=930)) == [(1, Cause.LEFT_EARLY)]
    waits = rank(1, -15, stopped=True, of=signs("after train step 3", done_at=960.0))
    for peer in (raised("peer", 990.0), hung()):
        assert culprits(rank(0, 1, of=peer), waits) == [(1, Cause.LEFT_EARLY)]


def test_the_one_that_never_ends_is_blamed_when_most_have():
    records = [rank(0, 0, at=930), rank(1, of=signs(since=900)), rank(2, 0, at=931)]
    assert culprits(*records) == [(1, Cause.HUNG)]


def test_of_waiting_ranks_the_one_elsewhere_is_blamed():
    waiting = [rank(n, 70, of=hung()) for n in (0, 1)]
    for other in ("train step 16", "reading data", "train step 18"):
        assert culprits(*waiting, rank(2, of=signs(other, since=920))) == [(2, Cause.HUNG)]
        assert culprits(*waiting, rank(2, 70, of=hung(other))) == [(2, Cause.HUNG)]


def test_a_rank_that_has_not_reported_is_blamed_by_those_that_wait():
    assert culprits(rank(0, 70, of=hung()), rank(1)) == [(1, Cause.NOT_STARTED)]


def test_of_two_the_one_that_waits_for_nobody_or_is_behind_is_blamed():
    reads = signs("reading data", since=935, bounded=False)
    assert culprits(rank(0, 70, of=hung()), rank(1, of=reads)) == [(1, Cause.HUNG)]
    behind = signs("train step 16", since=920)
    assert culprits(rank(0, 70, of=hung()), rank(1, of=behind)) == [(1, Cause.HUNG)]


def test_a_rank_that_is_mute_is_blamed_before_those_that_wait():
    mute = signs(heard_at=940.0)
    assert culprits(rank(0, 70, of=hung()), rank(1, of=mute)) == [(1, Cause.HUNG)]
    silent = signs(heard_at=930.0)
    assert culprits(rank(0, of=signs()), rank(1, of=silent)) == [(1, Cause.SILENT)]


def test_nothing_sets_ranks_apart_that_all_wait_at_the_same():
    records = [rank(n, 70, of=hung()) for n in (0, 1)]
    assert [number for number, _ in culprits(*records)] == [0, 1]


def test_a_rank_whose_connection_broke_has_a_moment_to_end():
    records = [rank(0, of=signs()), rank(1, of=signs(lost_at=NOW - 10))]
    assert culprits(*records) == [(1, Cause.DISCONNECTED)]


def test_a_rank_that_never_reports_is_blamed_only_if_others_have():
    late = [rank(0, of=signs(connected_at=NOW - 30)), rank(1)]
    assert culprits(*late) == [(1, Cause.NOT_STARTED)]
    assert not must_end([rank(0), rank(1)], LIMITS, NOW)


def test_over_ssh_a_shell_tells_signals_and_ssh_its_own_failure():
    for code, cause, shown in ((137, Cause.KILLED, 137), (255, Cause.UNREACHABLE, 255)):
        records = [rank(0, of=signs()), rank(1, code, remote=True)]
        (blamed,) = blame(records, LIMITS, NOW)
        assert (blamed.cause, blamed.exit_code, blamed.is_loss) == (cause, shown, True)


def test_exit_codes_and_what_may_be_gone_on_without():
    def of(record: RankStatus) -> tuple[int, bool]:
        (blamed,) = blame([record, rank(9, of=signs())], LIMITS, NOW)
        return blamed.exit_code, blamed.is_loss

    assert of(rank(0, -9)) == (137, True)
    assert of(rank(0, 137)) == (137, False)
    assert of(rank(0, 1)) == (1, False)
    assert of(rank(0, 75)) == (75, True)
    assert of(rank(0, 75, of=raised("error", 994.0))) == (75, True)
    assert of(rank(0, 3, of=raised("error", 994.0))) == (3, False)
    assert of(rank(0, -15, stopped=True, of=raised("error", 994.0))) == (1, False)
    assert of(rank(0, of=signs(heard_at=900.0))) == (70, True)


def test_the_report_names_the_culprit_and_where_all_were():
    records = [
        rank(0, -15, at=999, stopped=True, of=signs("train step 18")),
        rank(1, 1, of=raised("error", 994.0)),
    ]
    blamed = blame(records, LIMITS, NOW)
    assert headline(blamed) == (
        "rank 1 (host h) failed at train step 17 (exit code 1): error of its own."
    )
    lines = report(blamed, records, NOW).splitlines()
    assert lines[2].split() == "0 h train step 18 9.0 s ended by tfpar run (SIGTERM)".split()
    assert lines[3].split() == "1 h train step 17 5.0 s exit code 1; error of its own".split()


def test_a_rank_whose_data_end_earlier_is_named_rather_than_who_waits_for_it():
    short = rank(1, 70, of=hung("end of epoch 2", steps=15))
    records = [rank(0, 70, of=hung("train step 16", steps=15)), short]
    assert culprits(*records) == [(1, Cause.FEWER_BATCHES)]
    text = report(blame(records, LIMITS, NOW), records, NOW)
    assert (
        "rank 1 (host h) has had fewer batches than others: it is at end of epoch 2 after 15"
        in text
    )
    assert (
        "\nRank 0 waits for it at train step 16. Every rank has to read as many batches.\n" in text
    )
    assert culprits(records[0], short, rank(2, 70, of=hung("end of epoch 2", steps=15))) == [
        (1, Cause.FEWER_BATCHES),
        (2, Cause.FEWER_BATCHES),
    ]


def test_a_rank_that_calls_alone_is_named_with_what_it_calls():
    at = ("comparing the predict step", "test step 17", "save('m.keras')")
    for activity, said in zip(at, ("of `predict`", "of `evaluate`", "'m.keras')"), strict=True):
        records = [rank(n, 70, of=hung("train step 17", steps=16)) for n in (0, 1)]
        records.insert(1, rank(2, of=signs(activity, steps=16)))
        assert culprits(*records) == [(2, Cause.ELSEWHERE)]
        text = report(blame(records, LIMITS, NOW), records, NOW)
        assert f"rank 2 (host h) is at {activity}" in text and f"{said}, and the others" in text
        assert "Rank 0 waits for it at train step 17. Every rank has to call the same in" in text


def test_a_rank_that_has_not_got_so_far_is_who_hangs():
    through = [rank(n, 70, of=hung("end of epoch 2", steps=16)) for n in (0, 2)]
    assert culprits(rank(1, 70, of=hung("train step 16", steps=15)), *through) == [(1, Cause.HUNG)]
    notes = rank(0, 70, of=hung("train step 16 (comparing notes)", steps=16))
    busy = rank(1, 70, of=hung("train step 16", steps=15))
    assert (0, Cause.ELSEWHERE) not in culprits(notes, busy)
