"""Hypothesis strategies: meshes, shapes and specs, uneven and strided ones included."""

from hypothesis import strategies as st

from tfpar.spec import Mesh, Partial, Replicate, Shard, Spec

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(Mesh.of)
shapes = st.lists(st.integers(1, 13), max_size=3).map(tuple)


@st.composite
def specs(draw, shape, mesh, partial=False) -> Spec:
    """A spec that fits: strides divide what the axes before left of the dim."""
    lengths = list(shape)
    spec = []
    for parts in mesh.shape:
        kinds = ["R", *(["P"] if partial else []), *range(len(shape)), *range(len(shape))]
        kind = draw(st.sampled_from(kinds))
        if kind == "R":
            spec.append(Replicate())
        elif kind == "P":
            spec.append(Partial(draw(st.sampled_from(["sum", "max"]))))
        else:
            stride = draw(st.sampled_from([None, *_divisors(lengths[kind])]))
            unit = draw(st.sampled_from(_divisors(stride or lengths[kind])))
            shard = Shard(kind, stride, unit)
            lengths[kind] = shard.local_length(lengths[kind], parts)
            spec.append(shard)
    return tuple(spec)


@st.composite
def laid_out(draw, partial=False):
    """(shape, spec, mesh)."""
    mesh, shape = draw(meshes), draw(shapes)
    return shape, draw(specs(shape, mesh, partial)), mesh


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
