"""What was found out before is found again by what was looked at, and by nothing else."""

from tests.propagation.by_hand import PAIR, ByHand, begun, specs
from tfpar.propagation.memo_trie import MemoTrie, memoize_strategy

ROWS, COLUMNS, WHOLE = specs("S(0)", "S(1)", "R")


def three():
    build = ByHand()
    x, y, z = (build.fed(name, 4, 6) for name in "xyz")
    total = build.binary("AddV2", build.binary("AddV2", x, y), z)
    return build.prepared(total), x, y, z


def counted(x, y, asked):
    """A strategy that looks at y only where x is split."""

    def look(view):
        asked.append(view)
        return "whole" if view.specs.get(x) == WHOLE else view.specs[y]

    return look


def test_a_strategy_is_asked_once_for_what_it_looked_at():
    prepared, x, y, _ = three()
    asked = []
    for laid, answer, times in (
        (["S(0)", "S(1)", "R"], COLUMNS, 1),
        (["S(0)", "S(1)", "S(0)"], COLUMNS, 1),  # it did not look at z
        (["S(0)", "R", "R"], WHOLE, 2),
        (["R", "S(1)", "R"], "whole", 3),
        (["R", "R", "S(0)"], "whole", 3),
        (["S(0)", "S(1)", "R"], COLUMNS, 3),
    ):
        state = begun(prepared, PAIR, {}, laid)
        assert memoize_strategy(state, "which", counted(x, y, asked)) == answer
        assert len(asked) == times, laid
    assert memoize_strategy(state, "another", counted(x, y, asked)) == COLUMNS and len(asked) == 4


def test_where_a_plan_names_tensors_each_pass_asks():
    prepared, x, y, z = three()
    asked = []
    for _ in range(2):
        state = begun(prepared, PAIR, {}, ["S(0)", "S(1)", "R"], tensors={z: "R"})
        assert memoize_strategy(state, "which", counted(x, y, asked)) == COLUMNS
    assert len(asked) == 2


def test_who_reads_specs_for_a_pass_is_asked_for_the_same_ones_again():
    prepared, x, y, _ = three()
    reads = []

    class Ledger(dict):
        def get(self, tensor, default=None):
            reads.append(tensor)
            return dict.get(self, tensor, default)

    for times in (1, 2):
        state = begun(prepared, PAIR, {}, ["S(0)", "S(1)", "R"])
        state.specs = Ledger(state.specs)
        memoize_strategy(state, "which", lambda view: (view.specs.get(x), view.specs.get(y)))
        assert set(reads) == {x, y}, times
        if times == 2:
            assert reads == [x, y]
        reads.clear()


def test_an_answer_that_hangs_on_nothing_is_the_answer():
    readings = MemoTrie()
    assert readings.follow({}) is None
    readings.note({}, "always")
    assert readings.follow({}) == "always"
