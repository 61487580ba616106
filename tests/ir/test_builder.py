"""Names of emitted ops are unique, whatever the captured ops are called."""

from tfpar.ir.builder import GraphBuilder


def test_names_that_look_numbered_do_not_clash():
    build = GraphBuilder()
    wanted = ["zeros", "zeros", "zeros_1", "zeros", "zeros_1", "zeros_2"]
    names = [build.unique_name(name) for name in wanted]
    assert len(set(names)) == len(wanted)
    assert names[:2] == ["zeros", "zeros_1"]
