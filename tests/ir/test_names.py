"""Names that were written down elsewhere: which variable is meant, and where that is in doubt."""

from tfpar.ir.names import pair

LOADED = {"a/kernel": "net/a/kernel", "b/kernel": "net/b/kernel"}


def test_a_name_is_found_by_its_end():
    assert pair(["net/a/kernel", "net/b/kernel"], LOADED) == {
        "net/a/kernel": "a/kernel",
        "net/b/kernel": "b/kernel",
    }
    assert pair(["a/kernel"], {"net/a/kernel": ""}) == {"a/kernel": "net/a/kernel"}


def test_the_end_is_whole_parts():
    assert pair(["net/ba/kernel", "kernel"], {"a/kernel": "", "b/kernel": ""}) == {}


def test_an_equal_name_goes_first():
    now = {"a/kernel": "net/a/kernel", "encoder/a/kernel": "net/encoder/a/kernel"}
    assert pair(["a/kernel"], now) == {"a/kernel": "a/kernel"}
    assert pair(["net/a/kernel", "net/encoder/a/kernel"], now) == {
        "net/a/kernel": "a/kernel",
        "net/encoder/a/kernel": "encoder/a/kernel",
    }


def test_weights_of_one_path_are_told_apart_by_their_places():
    now = {"a/kernel": "net/left/a/kernel", "a/kernel#2": "net/right/a/kernel"}
    assert pair(["right/a/kernel", "left/a/kernel"], now) == {
        "right/a/kernel": "a/kernel#2",
        "left/a/kernel": "a/kernel",
    }
    assert pair(list(now), now) == {n: n for n in now}


def test_a_path_that_others_share_now_is_no_evidence():
    now = {"a/kernel": "net/left/a/kernel", "a/kernel#2": "net/a/kernel"}
    assert pair(["left/a/kernel", "a/kernel"], now) == {
        "left/a/kernel": "a/kernel",
        "a/kernel": "a/kernel#2",
    }


def test_where_two_are_meant_none_is():
    assert pair(["left/a/kernel", "right/a/kernel"], {"a/kernel": "", "a/kernel#2": ""}) == {}


def test_slots_go_with_their_weights():
    written = ["net/a/kernel", "adam/net_a_kernel_velocity", "adam/net_a_kernel_momentum"]
    now = {
        "a/kernel": "net/a/kernel",
        "adam_1/a_kernel_momentum": "",
        "adam_1/a_kernel_velocity": "",
    }
    assert pair(written, now) == {
        "net/a/kernel": "a/kernel",
        "adam/net_a_kernel_velocity": "adam_1/a_kernel_velocity",
        "adam/net_a_kernel_momentum": "adam_1/a_kernel_momentum",
    }


def test_what_is_counted_in_a_process_is_paired_in_order():
    written = ["seed_generator_9/state", "seed_generator_10/state", "adam/iteration"]
    now = {"seed_generator/state": "", "seed_generator_1/state": "", "adam_3/iteration": ""}
    assert pair(written, now, counted=now) == {
        "seed_generator_9/state": "seed_generator/state",
        "seed_generator_10/state": "seed_generator_1/state",
        "adam/iteration": "adam_3/iteration",
    }
    assert pair(["dense_3/kernel"], {"dense/kernel": ""}) == {}
