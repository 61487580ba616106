"""Cluster files: what they hold, and that a mistake in one is named."""

import dataclasses
import math

import numpy as np
import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

import tfpar as tap
from tfpar.cluster import units
from tfpar.cluster.description import Cluster, MeasuredCollective, slowest_of
from tfpar.cluster.files import cluster_of, cluster_text, describe, read_cluster, write_cluster
from tfpar.cluster.lookup import find_cluster, preset_names, read_preset
from tfpar.cost import transfer_seconds
from tfpar.spec import Mesh, TfparError, format_bytes

FILE = """
name = "ours"

[[level]]
count = 3
bandwidth = "200 Gbit/s"
latency = "8 us"

[[node]]
count = 2

[node.device]
memory = "80 GB"
memory_bandwidth = "1.6 TB/s"
launch = "4 us"
flops = { float32 = "100 TFLOP/s", bfloat16 = 220e12 }

[[node.level]]
count = 8
topology = "direct"
bandwidth = "600 GB/s"
latency = "4 us"

[[node]]
uplink = "10 Gbps"
device = { memory = "16 GiB", memory_bandwidth = "300 GB/s", flops = "8 TFLOPS" }

[[measured]]
kind = "all_gather"
mesh = [2, 8]
axis = 1
startup = "30 us"
bandwidth = "90 GB/s"
"""


LEVEL = FILE[FILE.index("[[level]]") : FILE.index("[[node]]")]


@pytest.fixture
def write(tmp_path):
    def written(text):
        path = tmp_path / "ours.toml"
        path.write_text(text)
        return str(path)

    return written


def test_devices_have_a_rent(write):
    """No cost depends on it: plans are for the same machines, whatever they are rented for."""
    text = FILE.replace('launch = "4 us"', 'launch = "4 us"\nprice_per_hour = 3.06', 1)
    rented, free = find_cluster(write(text)), find_cluster(write(FILE))
    prices = [device.price_per_hour for device in rented.devices]
    assert prices == [3.06] * 16 + [None]
    assert rented == free and rented.fingerprint() == free.fingerprint()
    for again in (cluster_of(describe(rented)), read_cluster(write(cluster_text(rented)))):
        assert [device.price_per_hour for device in again.devices] == prices
    with pytest.raises(TfparError, match=r"node\[0\].device.price_per_hour is -1"):
        find_cluster(write(text.replace("3.06", "-1")))


def test_prices_are_set_by_the_names_of_devices():
    cloud = find_cluster("aws-p5-p4d")
    cheaper = cloud.with_prices({"A100-SXM4-40GB": 1})
    assert [n.device.price_per_hour for n in cheaper.nodes] == [6.88, 1.0]
    assert [bool(n.device.price_source) for n in cheaper.nodes] == [True, False]
    assert cheaper == cloud and cheaper.fingerprint() == cloud.fingerprint()
    with pytest.raises(TfparError, match="has no device 'T4', but 'H100-SXM5-80GB', 'A100"):
        cloud.with_prices({"T4": 1.0})
    with pytest.raises(TfparError, match="prices is 3; it must be dollars an hour, by"):
        cloud.with_prices(3)
    with pytest.raises(TfparError, match="price_per_hour is 'free'"):
        cloud.with_prices({"A100-SXM4-40GB": "free"})


def test_a_file_becomes_a_cluster(write):
    cluster = find_cluster(write(FILE))
    assert (cluster.name, cluster.size, cluster.num_nodes) == ("ours", 17, 3)
    assert cluster.levels[0].bandwidth == 25e9 and cluster.levels[0].latency_s == 8e-6
    first, second = cluster.nodes
    assert first.device.flops_of("float32") == 100e12
    assert first.device.flops_of("float16") == 220e12, "as the other type of 16 bits"
    assert first.levels[0].pair_bandwidth == pytest.approx(600e9 / 7)
    assert second.uplink == 1.25e9 and second.device.memory_bytes == 16 * 2**30
    assert cluster.measured == (MeasuredCollective("all_gather", (2, 8), 1, 30e-6, 90e9),)
    assert cluster.shape_text() == "2 nodes of 8, 1 node of 1"


def test_files_and_mappings_round_trip(write, tmp_path):
    for name in preset_names():
        cluster = find_cluster(name, None)
        path = str(tmp_path / "written.toml")
        write_cluster(cluster, path)
        assert read_cluster(path) == cluster
        assert cluster_of(describe(cluster)) == cluster
    assert '"240 GB/s"' in open(write_and_path(tmp_path)).read()


def write_and_path(tmp_path):
    path = str(tmp_path / "dgx.toml")
    write_cluster(find_cluster("dgx-a100"), path)
    return path


def changed(old, new):
    assert old in FILE
    return FILE.replace(old, new, 1)


@pytest.mark.parametrize(
    "text, message",
    [
        (
            changed('bandwidth = "200 Gbit/s"\n', ""),
            r"level\[0\].bandwidth is missing; it must be bytes/s such as 25 GB/s",
        ),
        (
            changed('bandwidth = "200 Gbit/s"', "bandwidth = 0"),
            r"level\[0\].bandwidth is 0.0; it must be a number above 0",
        ),
        (
            changed('"200 Gbit/s"', '"200 GB"'),
            r"level\[0\].bandwidth is '200 GB': 'GB' is no unit of bytes/s such as",
        ),
        (
            changed('"80 GB"', '"80 GFLOP/s"'),
            r"node\[0\].device.memory is .*no unit of bytes such as 80 GB",
        ),
        (
            changed('"4 us"', '"four us"'),
            r"node\[0\].device.launch is 'four us', not seconds such as 5 us",
        ),
        (changed('memory = "80 GB"\n', ""), r"node\[0\].device.memory is missing"),
        (changed("count = 8\n", ""), r"node\[0\].level\[0\].count is missing"),
        (
            changed("count = 8", 'count = "8"'),
            r"node\[0\].level\[0\].count is '8'; it must be a whole number",
        ),
        (
            changed("count = 8", "count = 0"),
            r"node\[0\].level\[0\].count is 0; it must be a whole number, 1 or more",
        ),
        (
            changed('"direct"', '"star"'),
            r"node\[0\].level\[0\].topology is 'star'; it must be one of 'switch'",
        ),
        (
            changed("latency =", "latancy ="),
            r"level\[0\].latancy is not known \(did you mean latency\?\); there are count",
        ),
        (changed("count = 3", "count = 4"), "its levels join 4 nodes, but it has 3"),
        (FILE.replace(LEVEL, ""), "no `level` that joins them: the link between nodes is missing"),
        (
            changed(
                'flops = { float32 = "100 TFLOP/s", bfloat16 = 220e12 }',
                "flops = { bfloat16 = 1e12 }",
            ),
            r"node\[0\].device.flops is .*bfloat16.*; it must be .* 'float32' at least",
        ),
        (
            changed("mesh = [2, 8]", "mesh = [8, 8]"),
            r"measured\[0\].mesh has 64 ranks, but there are 17 devices",
        ),
        (
            changed("axis = 1", "axis = 2"),
            r"measured\[0\].axis is 2, but measured\[0\].mesh has 2 axes",
        ),
        (changed('name = "ours"', "overlap = 2.0"), "overlap is 2.0; it must be from 0"),
        (
            changed('name = "ours"', 'algorithms = ["star"]'),
            r"algorithms is \['star'\]; it must be some of 'ring'",
        ),
        (changed('name = "ours"', "algorithms = 5"), "algorithms is 5; it must be some of"),
        (changed('"1.6 TB/s"', "1e999"), "device.memory_bandwidth is inf; it must be finite"),
        (changed('"1.6 TB/s"', '"1e999"'), ".*memory_bandwidth is '1e999', which no number can"),
        (
            changed("count = 8", "count = 800_000_000"),
            r"node\[0\].level\[0\].count is 800000000",
        ),
        (
            changed("mesh = [2, 8]", "mesh = [2, 8.5]"),
            r"measured\[0\].mesh\[1\] is 8.5; it must be a whole number",
        ),
        (changed("mesh = [2, 8]", "mesh = 16"), r"measured\[0\].mesh is 16; it must be a list"),
        (changed("count = 2", "count = 0"), r"node\[0\].count is 0; it must be a whole number, 1"),
        (changed("count = 3", "count = 0"), r"level\[0\].count is 0; it must be a whole number, 1"),
        (
            changed("mesh = [2, 8]", "mesh = [0, 8]"),
            r"measured\[0\].mesh is 0; it must be a whole number",
        ),
        ("node = []", r"node is \[\]; it must be one or more tables, each below \[\[node\]\]"),
        (
            FILE + '\n[[link]]\nfrom = 0\nto = 7\nbandwidth = "1 GB/s"\n',
            "link is not known; there are .*level",
        ),
        (
            changed('name = "ours"', 'name = "ours"\nranks = [0, 17]'),
            "'ours': its `ranks` name rank 17, but it has 17 devices",
        ),
        (changed('name = "ours"', 'name = "ours"\nranks = []'), "its `ranks` are empty"),
        (
            changed('"80 GB"', '"80 Gbit"'),
            r"node\[0\].device.memory is '80 Gbit': 'Gbit' is no unit of bytes",
        ),
        (
            changed('"8 us"', '"8 GB/s"'),
            r"level\[0\].latency is '8 GB/s': 'GB/s' is no unit of seconds",
        ),
        (
            changed('"200 Gbit/s"', '"200 Gbit/s 25 GB/s"'),
            r"level\[0\].bandwidth is '200 Gbit/s 25 GB/s', not bytes/s such as",
        ),
        (
            changed('"100 TFLOP/s"', '"100 TB/s"'),
            r"node\[0\].device.flops.float32 is '100 TB/s': 'TB/s' is no unit of FLOP/s",
        ),
        (
            changed('"10 Gbps"', '"10 us"'),
            r"node\[1\].uplink is '10 us': 'us' is no unit of bytes/s",
        ),
        (
            changed("count = 3", 'count = "3 nodes"'),
            r"level\[0\].count is '3 nodes'; it must be a whole number",
        ),
        (
            changed('"80 GB"', '"-80 GB"'),
            r"node\[0\].device.memory is -80000000000.0; it must be a number above 0",
        ),
        (changed('"4 us"', "-1"), r"node\[0\].device.launch is -1"),
        (
            changed('"600 GB/s"', '"-600 GB/s"'),
            r"node\[0\].level\[0\].bandwidth is -600000000000.0; it must be a number above 0\.",
        ),
        (
            changed("bfloat16 = 220e12", "blfoat16 = 220e12"),
            r"node\[0\].device.flops's dtype is 'blfoat16'; it must be one such as 'bfloat16'",
        ),
        (
            changed('"all_gather"', '"allgather"'),
            r"measured\[0\].kind is 'allgather'; it must be one of 'all_reduce'",
        ),
        (changed('name = "ours"', "step = -1"), "step is -1"),
        ('name = "none"', r"node is missing; it must be one or more tables, each below \[\[node"),
        ("node = 3", r"node is 3; it must be one or more tables, each below \[\[node\]\]"),
        ("name = ", "Cannot read the cluster file '.*ours.toml': .*line 1"),
    ],
)
def test_a_mistake_is_named_with_file_and_key(write, text, message):
    path = write(text)
    with pytest.raises(TfparError, match=message) as error:
        read_cluster(path)
    assert path in str(error.value)


def test_unknown_presets_are_answered_with_those_there_are():
    with pytest.raises(
        TfparError, match="no cluster 'tpu': neither a file nor one of .*'dgx-a100'"
    ):
        find_cluster("tpu")
    with pytest.raises(TfparError, match="cluster is 3; it must be a Cluster, the name of"):
        find_cluster(3)


# --- presets ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, sizes, shape",
    [
        ("dgx-a100", [2, 8], "2 nodes of 8"),
        ("dgx-a100", [4], "1 node of 4"),
        ("dgx-a100", [32], "4 nodes of 8"),
        ("v100-ethernet", [2, 2, 3], "2 nodes of 6"),
        ("rhino-s1", [4, 1], "4 nodes of 1"),
        ("rhino-s1", [4], "4 nodes of 1"),
        ("atp-ic1", [4], "1 node of 4"),  # what was measured on eight is left out
        ("atp-ic2", [6], "1 node of 6"),
        ("atp-ic6", [16], "1 node of 16"),
        ("cpu", [2, 4], "2 nodes of 4"),
        ("auto3d-heterogeneous", [16], "3 nodes of 4, 4 nodes of 1"),
        ("aws-p3-g4dn", [4, 4], "3 nodes of 4, 1 node of 4"),
        ("aws-p5-p4d", [4, 8], "2 nodes of 8, 2 nodes of 8"),
        ("azure-nda100-ndv2", [4, 8], "2 nodes of 8, 2 nodes of 8"),
        ("gcp-a3-a2", [32], "2 nodes of 8, 2 nodes of 8"),
    ],
)
def test_a_preset_has_the_shape_of_the_mesh(name, sizes, shape):
    cluster = find_cluster(name, Mesh.of(sizes))
    assert cluster.shape_text() == shape and cluster.name == name
    cluster.check(Mesh.of(sizes))


@pytest.mark.parametrize("name", ["aws-p3-g4dn", "aws-p5-p4d", "azure-nda100-ndv2", "gcp-a3-a2"])
def test_a_mixed_fleet_has_slower_machines_with_slower_links(name):
    cluster = read_preset(name)
    first, last = cluster.devices[0], cluster.devices[-1]
    assert first.name != last.name and first.flops["float16"] > 1.5 * last.flops["float16"]
    size = cluster.nodes[0].size
    between = [
        transfer_seconds([(rank, other)], 1e9, cluster)
        for rank, other in ((0, size), (0, cluster.size - 1), (0, 1))
    ]
    assert between[2] < between[0] <= between[1], "within a machine, between alike, and others"


@pytest.mark.parametrize(
    "name, sizes, message",
    [
        ("dgx-a100", [1, 16], "asks for 1 nodes of 16 devices, but a node of 'dgx-a100' has 8"),
        ("atp-ic3", [2, 8], "asks for 2 nodes, but 'atp-ic3' is a single machine"),
        ("atp-ic2", [3], "3 devices of cluster 'atp-ic2' do not fill its gpu groups of 2"),
    ],
)
def test_a_preset_that_cannot_be_fitted_says_why(name, sizes, message):
    with pytest.raises(TfparError, match=message):
        find_cluster(name, Mesh.of(sizes))


def test_a_cluster_made_in_python():
    device = tap.Device({"float32": 1e13}, 16e9, 5e11)
    cluster = tap.Cluster.regular(
        "ours", device, [tap.Level(2, 1e9, 1e-5), tap.Level(4, 1e10, 1e-6)]
    )
    assert (
        cluster.shape_text() == "2 nodes of 4"
        and cluster.with_memory(8e9).device.memory_bytes == 8e9
    )
    assert cluster.with_memory(None) is cluster
    listed = tap.Cluster("listed", [tap.Node(device, [tap.Level(np.int64(2), 1, 0)])])
    assert listed == tap.Cluster("listed", (tap.Node(device, (tap.Level(2, 1.0, 0.0),)),))
    assert listed.fingerprint() and hash(listed)


def test_a_fingerprint_is_of_all_but_the_names():
    cluster = find_cluster("dgx-a100")
    prints = {dataclasses.replace(cluster, name="other").fingerprint(), cluster.fingerprint()}
    assert len(prints) == 1
    (level,) = cluster.levels
    for change in (
        {"overlap": 0.5},
        {"algorithms": ("ring",)},
        {"nodes": cluster.with_memory(1e9).nodes},
        {"nodes": cluster.with_device(ramp_s=1e-6).nodes},
        {"nodes": cluster.with_device(entries_per_s={"Sum": 1e9}).nodes},
        {"levels": (dataclasses.replace(level, p2p=1e9),)},
        {"measured": (MeasuredCollective("all_reduce", (2,), 0, 1e-6, 1e9),)},
    ):
        prints.add(dataclasses.replace(cluster, **change).fingerprint())
    assert len(prints) == 8
    whole = Cluster.regular("c", tap.Device({"float32": 1}, 1, 1), [tap.Level(2, 10**9, 0)])
    rounded = Cluster.regular("c", tap.Device({"float32": 1.0}, 1.0, 1.0), [tap.Level(2, 1e9, 0.0)])
    assert whole.fingerprint() == rounded.fingerprint()


# --- units --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, measure, value",
    [
        ("600 GB/s", "bytes/s", 600e9),
        ("200Gbit/s", "bytes/s", 25e9),
        ("32 Gb/s", "bytes/s", 4e9),
        ("10 Gbps", "bytes/s", 1.25e9),
        ("1 GiB/s", "bytes/s", 2.0**30),
        ("1.5e3", "bytes/s", 1500.0),
        ("80 GB", "bytes", 80e9),
        ("10 us", "seconds", 1e-5),
        ("3 ms", "seconds", 3e-3),
        ("312 TFLOP/s", "FLOP/s", 312e12),
        (7, "bytes", 7.0),
        ("1 PFLOPS", "FLOP/s", 1e15),
    ],
)
def test_quantities(text, measure, value):
    assert units.parse(text, measure) == value
    assert units.parse(units.write(value, measure), measure) == value


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.5 * 2**20, "1.50 MiB"),
        (190.03e6, "181.23 MiB"),
        (2**30 + 1, "1.01 GiB"),
        (2**60, "1024.00 PiB"),
        (math.inf, "inf B"),
        (0.25, "1 B"),
    ],
)
def test_sizes_are_printed_in_units_of_2_to_the_10(size, text):
    assert format_bytes(size) == text


@given(st.one_of(st.integers(0, 2**62), st.floats(0, 2**62)))
def test_a_size_that_was_printed_is_enough_as_a_limit(size):
    printed = units.parse(format_bytes(size), "bytes")
    assert size <= printed <= max(1.01 * size, size + 1)


@pytest.mark.parametrize("bad", ["", "GB", "1 2 GB", None, True, [1], "1..2 GB"])
def test_what_is_no_quantity(bad):
    with pytest.raises(ValueError, match="such as 80 GB"):
        units.parse(bad, "bytes")


def test_steps_and_one_memory_are_read_and_written(write, tmp_path):
    cluster = read_cluster(write('step = "150 us"\none_memory = true\n' + FILE))
    assert (cluster.step_s, cluster.one_memory) == (150e-6, True)
    path = str(tmp_path / "again.toml")
    write_cluster(cluster, path)
    assert read_cluster(path) == cluster
    for key, value in (("step", '"-1 us"'), ("one_memory", '"yes"')):
        with pytest.raises(TfparError, match=f"{key}.* is"):
            read_cluster(write(f"{key} = {value}\n{FILE}"))


def test_host_memory_is_read_and_written_and_devices_have_an_even_part(write, tmp_path):
    text = FILE.replace("[[node]]\n", '[[node]]\nhost_memory = "1 TB"\n', 1)
    cluster = read_cluster(write(text))
    first, second = cluster.nodes
    assert (first.host_memory_bytes, second.host_memory_bytes) == (1e12, None)
    assert cluster.host_share_bytes == pytest.approx(1e12 / first.size)
    assert cluster.part([cluster.size - 1]).host_share_bytes == math.inf
    write_cluster(cluster, tmp_path / "again.toml")
    assert read_cluster(tmp_path / "again.toml") == cluster
    assert find_cluster("dgx-a100", Mesh.of([2, 4])).host_share_bytes == pytest.approx(2e12 / 4)
    assert cluster.with_host_memory(None).fingerprint() != cluster.fingerprint()


def test_rates_of_slow_ops_and_the_ramp_are_in_the_file():
    device = tap.Device({"float32": 1e9}, 1e9, 1e9, ramp_s=2e-5, entries_per_s={"Sum": 3e8})
    cluster = Cluster.regular("slow", device, [tap.Level(2, 1e9, 1e-6)])
    text = cluster_text(cluster)
    assert 'ramp = "20 us"' in text and "Sum = 300000000.0" in text
    assert cluster_of(tomlkit.parse(text).unwrap()) == cluster


def test_the_slowest_device_has_the_least_of_each_rate_and_the_longest_ramp():
    one, other = (
        tap.Device({"float32": 1e9}, 1e9, 1e9, ramp_s=ramp_s, entries_per_s=rates)
        for ramp_s, rates in ((1e-5, {"Sum": 3e8, "Exp": 1e9}), (2e-5, {"Sum": 2e8}))
    )
    found = slowest_of([one, other])
    assert found.entries_per_s == {"Sum": 2e8, "Exp": 1e9} and found.ramp_s == 2e-5
