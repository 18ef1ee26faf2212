"""Files of the protocol `mooncake`: what fsspec promises of a file system."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import pickle
import threading
import warnings
from importlib import metadata

import pytest
from conftest import MIB, run_script, start_master

import mooncake

file_systems = pytest.importorskip("file_systems")

from mooncake.files import MooncakeFileSystem, transfers  # noqa: E402 - imports fsspec

fsspec = file_systems.fsspec
leave_pools = file_systems.leave_pools
fs = file_systems.fs
write = file_systems.write
write_and_fail = file_systems.write_and_fail


def test_protocol_is_in_the_metadata_of_the_package():
    [point] = metadata.entry_points(group="fsspec.specs", name="mooncake")
    assert point.load() is MooncakeFileSystem
    assert fsspec.get_filesystem_class("mooncake") is MooncakeFileSystem


def test_file_is_the_object_of_its_path(store, fs):
    with fs.open("run/a", "wb") as file:
        assert file.write(b"abc") == 3
        assert file.write(memoryview(b"def")) == 3
        assert file.tell() == 6
    assert store.get("run/a") == b"abcdef"
    store.put("run/b", b"by put")
    with fs.open("mooncake:///run/b") as file:
        assert file.read() == b"by put"
        assert (file.size, file.name) == (6, "run/b")


def test_url_names_the_pool(store):
    url = f"mooncake://{store.master_address}/a/b"
    with fsspec.open(url, "wb") as file:
        file.write(b"there")
    assert store.get("a/b") == b"there"
    fs, path = fsspec.url_to_fs(url)
    assert path == "a/b"
    assert fs.unstrip_protocol(path) == url
    assert fs.store is fsspec.url_to_fs(url)[0].store, "one connection for a pool"
    with pytest.raises(ValueError, match="in another pool"):
        fs.cat_file("mooncake://127.0.0.1:1/a/b")


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("mooncake://h:1/a/b", "a/b"),
        ("mooncake:///a/b/", "a/b"),
        ("/a b", "a b"),
        ("mooncake://h:1", ""),
        ("a?b#c%20", "a?b#c%20"),
        (["mooncake:///a", "b"], ["a", "b"]),
    ],
)
def test_paths_of_urls(path, key):
    assert MooncakeFileSystem._strip_protocol(path) == key


def test_pool_is_that_of_the_environment(store, monkeypatch):
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    with pytest.raises(mooncake.InvalidArgumentError, match="MOONCAKE_MASTER is not set"):
        fsspec.filesystem("mooncake").ls("")
    monkeypatch.setenv("MOONCAKE_MASTER", store.master_address)
    with fsspec.open("mooncake:///x", "w") as file:
        file.write("text")
    assert store.get("x") == b"text"


def test_token_and_tenant_are_storage_options(monkeypatch):
    monkeypatch.delenv("MOONCAKE_MASTER_TOKEN", raising=False)
    config = mooncake.StoreConfig(segment_bytes=16 * MIB, token="a secret token")
    with mooncake.Store(config=config) as store:
        fs = fsspec.filesystem("mooncake", master=store.master_address, token="a secret token")
        fs.pipe_file("x", b"1")
        assert store.get("x") == b"1"
        wrong = fsspec.filesystem("mooncake", master=store.master_address)
        with pytest.raises(mooncake.MooncakeError, match="token"):
            wrong.cat_file("x")
        assert b"secret" not in pickle.dumps(fs)
        assert "secret" not in fs.to_json()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tokn": "x"}, "'tokn'; did you mean 'token'"),
        ({"anon": True}, "no storage option 'anon'; there are master"),
    ],
)
def test_unknown_storage_options_are_refused(options, text):
    with pytest.raises(TypeError, match=text):
        fsspec.filesystem("mooncake", master="127.0.0.1:1", **options)


def test_store_with_another_pool_is_refused(store):
    with pytest.raises(ValueError, match=r"leave out master=127\.0\.0\.1:1, token"):
        fsspec.filesystem("mooncake", master="127.0.0.1:1", store=store, token="12345678")


def test_listings_show_files_and_directories(store, fs):
    write(fs, "a/1", "a/b/2", "a/b/c/3", "a.txt", "z")
    store.put("a//4", b"no path")
    assert fs.ls("", detail=False) == ["a.txt", "a", "z"]
    assert fs.ls("a", detail=False) == ["a/1", "a/b"]
    assert fs.ls("a/1", detail=False) == ["a/1"]
    assert fs.ls("a/b")[0] == {"name": "a/b/2", "size": 5, "type": "file"}
    assert fs.ls("a/b")[1] == {"name": "a/b/c", "size": 0, "type": "directory"}
    assert fs.find("a") == ["a/1", "a/b/2", "a/b/c/3"]
    assert fs.find("a", maxdepth=1) == ["a/1"]
    assert fs.find("a", withdirs=True) == ["a", "a/1", "a/b", "a/b/2", "a/b/c", "a/b/c/3"]
    assert fs.find("z") == ["z"]
    assert fs.du("a") == 3 + 5 + 7
    assert [entry[0] for entry in fs.walk("a")] == ["a", "a/b", "a/b/c"]
    with pytest.raises(FileNotFoundError):
        fs.ls("none")


def test_file_that_is_also_a_directory_is_found(fs):
    write(fs, "k/m", "k/m/p", "k/n")
    assert fs.find("k") == ["k/m", "k/m/p", "k/n"]
    assert fs.find("k", maxdepth=1) == ["k/m", "k/n"]
    assert fs.find("k", withdirs=True, detail=True)["k/m"]["type"] == "file"
    assert fs.du("k") == len("k/m" + "k/m/p" + "k/n")


def test_listing_of_a_prefix_leaves_other_names_alone(fs):
    write(fs, "run/1/x", "run/10/x", "run/1.txt")
    assert fs.ls("run/1", detail=False) == ["run/1/x"]
    assert fs.find("run/1") == ["run/1/x"]
    fs.rm("run/1", recursive=True)
    assert fs.find("run") == ["run/1.txt", "run/10/x"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a/*", ["a/1", "a/b"]),
        ("a/**", ["a", "a/1", "a/b", "a/b/2", "a/b/c", "a/b/c/3"]),
        ("a/*/*", ["a/b/2", "a/b/c"]),
        ("a/**/3", ["a/b/c/3"]),
        ("*", ["a", "ab", "z"]),
        ("a?", ["ab"]),
        ("[az]*", ["a", "ab", "z"]),
        ("none*", []),
    ],
)
def test_globs(fs, pattern, found):
    write(fs, "a/1", "a/b/2", "a/b/c/3", "ab", "z")
    assert fs.glob(pattern) == found


def test_large_directories_below_are_skipped(store, fs):
    store.put_many(
        {f"d/sub{at % 3}/{number:05}": b"xy" for at in range(3) for number in range(8000)}
    )
    store.put("d/z", b"xy")
    store.put(b"d/sub1/\xff\xff", b"xy")
    calls = []
    native = store._native

    class Counted:
        def list(self, **arguments):
            calls.append(arguments)
            return native.list(**arguments)

        def describe(self, keys):
            return native.describe(keys)

    from mooncake.files.listing import entries

    assert [each.path for each in entries(Counted(), "d", depth=1)] == [
        "d/sub0",
        "d/sub1",
        "d/sub2",
        "d/z",
    ]
    few = len(calls)
    assert len(list(entries(Counted(), "d", depth=None))) == 24002 + 3
    assert few < len(calls) - few, "keys below a directory are not listed"


def test_info_and_kinds(store, fs):
    write(fs, "a/b")
    assert fs.info("a/b") == {
        "name": "a/b",
        "size": 3,
        "type": "file",
        "version": store.info("a/b").version,
    }
    assert fs.info("a")["type"] == fs.info("")["type"] == "directory"
    assert (fs.isfile("a/b"), fs.isdir("a"), fs.isdir("a/b"), fs.isfile("no")) == (1, 1, 0, 0)
    assert (fs.exists("a/b"), fs.exists("a"), fs.exists("a/"), fs.exists("a/c")) == (1, 1, 1, 0)
    assert fs.size("a/b") == 3
    before = fs.ukey("a/b")
    fs.pipe_file("a/b", b"xyz")
    assert fs.ukey("a/b") != before


def test_missing_files_are_file_not_found(fs):
    for call in (fs.info, fs.cat_file, fs.open, fs.rm_file, fs.rm, fs.ls, fs.size):
        with pytest.raises(FileNotFoundError, match="no/file"):
            call("no/file")
    with pytest.raises(FileNotFoundError):
        fs.cp_file("no/file", "x")
    with pytest.raises(FileNotFoundError):
        fs.get_file("no/file", "x")
    assert not fs.exists("no/file")


def test_unreachable_pool_is_no_missing_file():
    master = start_master()
    fs = fsspec.filesystem("mooncake", master=master.address)
    assert fs.ls("") == []
    master.kill()
    with pytest.raises(mooncake.UnavailableError):
        fs.exists("x")


def test_directory_is_no_file(fs):
    write(fs, "a/b")
    for call in (fs.cat_file, fs.open, fs.rm):
        with pytest.raises(IsADirectoryError):
            call("a")
    with pytest.raises(IsADirectoryError, match="the root is no file"):
        fs.pipe_file("", b"x")


def test_ranges_of_a_file(fs):
    content = bytes(range(256))
    fs.pipe_file("x", content)
    for start, end in [(None, None), (3, 10), (-5, None), (None, -250), (250, 400), (9, 3)]:
        assert fs.cat_file("x", start, end) == content[start:end]
    assert fs.cat_ranges(["x", "x"], [0, 5], [2, 9]) == [content[:2], content[5:9]]
    assert fs.cat(["x"]) == {"x": content}
    assert fs.head("x", 3) == content[:3]
    assert fs.tail("x", 3) == content[-3:]
    assert fs.read_block("x", 10, 5) == content[10:15]


def test_reads_are_ranged_and_buffered(fs):
    content = bytes(range(256)) * 64
    fs.pipe_file("x", content)
    with fs.open("x", block_size=1000) as file:
        assert file.seek(-4, io.SEEK_END) == len(content) - 4
        assert file.read() == content[-4:]
        assert file.read(5) == b""
        file.seek(100)
        assert file.read(10) == content[100:110]
        assert file.read(5000) == content[110:5110]
        assert file.read(3) == content[5110:5113]
        target = bytearray(3000)
        assert file.readinto(target) == 3000
        assert target == content[5113:8113]
        assert file.tell() == 8113
        assert file.read(-1) == content[8113:]
        file.seek(len(content) + 5)
        assert file.read(2000) == b""
        with pytest.raises(io.UnsupportedOperation):
            file.write(b"x")
    with pytest.raises(ValueError, match="closed"):
        file.read()


def test_large_reads_go_to_the_memory_of_the_caller(store, fs):
    fs.pipe_file("x", bytes(4 * MIB))
    lengths = []
    with fs.open("x") as file:
        raw = file.raw

        class Counted(type(raw)):
            def readinto(self, buffer):
                lengths.append(len(buffer))
                return super().readinto(buffer)

        raw.__class__ = Counted
        assert file.readinto(bytearray(4 * MIB)) == 4 * MIB
        assert lengths == [4 * MIB]
        file.seek(0)
        assert len(file.read()) == 4 * MIB
        assert lengths == [4 * MIB], "read as one value"


def test_text_and_compression(fs):
    with fs.open("a.txt", "w", encoding="utf-8") as file:
        file.write("zwölf\n")
    with fs.open("a.txt", "r", encoding="utf-8") as file:
        assert file.readlines() == ["zwölf\n"]
    with fs.open("a.gz", "wb", compression="gzip") as file:
        file.write(b"x" * 1000)
    assert fs.size("a.gz") < 1000
    with fs.open("a.gz", "rb", compression="infer") as file:
        assert file.read() == b"x" * 1000


def test_file_is_replaced_when_it_is_closed(store, fs):
    fs.pipe_file("x", b"old")
    for size in (None, 3):
        before = fs.cat_file("x")
        file = fs.open("x", "wb", size=size)
        file.write(b"new" if size is None else b"two")
        assert fs.cat_file("x") == before
        assert fs.size("x") == 3
        file.close()
        assert fs.cat_file("x") != before
        file.close()
    assert fs.cat_file("x") == b"two"


def test_new_file_is_not_there_before_it_is_closed(fs):
    for size in (None, 4):
        file = fs.open(f"d/{size}", "wb", size=size)
        file.write(b"1234")
        assert not fs.exists(f"d/{size}")
        assert fs.find("") == []
        file.close()
        assert fs.cat_file(f"d/{size}") == b"1234"
        fs.rm("d", recursive=True)


def test_modes(fs):
    with pytest.raises(NotImplementedError, match="'r', 'w' or 'x', not 'ab'"):
        fs.open("x", "ab")
    with pytest.raises(NotImplementedError):
        fs.open("x", "a")
    with fs.open("x", "xb") as file:
        file.write(b"1")
        assert not file.readable()
        assert not file.seekable()
        with pytest.raises(io.UnsupportedOperation):
            file.read()
    with pytest.raises(FileExistsError):
        fs.open("x", "xb")
    with pytest.raises(FileExistsError) as caught:
        fs.pipe_file("x", b"2", mode="create")
    assert "the file exists already" in caught.value.__notes__[0]
    assert fs.cat_file("x") == b"1"
    with pytest.raises(ValueError, match="closed"):
        file.write(b"2")


@pytest.mark.parametrize("size", [None, 1])
def test_exclusive_file_fails_if_another_came_first(store, fs, size):
    file = store.file("x", "xb", size=size)
    file.write(b"2")
    if size is None:
        store.put("x", b"1")
        with pytest.raises(mooncake.AlreadyExistsError):
            file.close()
        assert store.get("x") == b"1"
    else:
        file.close()
        with pytest.raises(mooncake.AlreadyExistsError):
            store.file("x", "xb", size=size)


def test_lengths_that_were_given_are_kept(store, fs):
    fs.pipe_file("x", b"old")
    with pytest.raises(ValueError, match="more bytes"), fs.open("x", "wb", size=3) as file:
        file.write(b"four")
    with pytest.raises(ValueError, match="fewer bytes"), fs.open("x", "wb", size=3) as file:
        file.write(b"1")
    with pytest.raises(ValueError, match="more bytes"), fs.open("x", "wb", size=0) as file:
        file.write(b"1")
    assert store.get("x") == b"old"


def test_empty_files(store, fs):
    with fs.open("d/x", "wb"):
        pass
    fs.pipe_file("d/y", b"")
    fs.touch("d/z")
    store.put("d/w", b"\0")
    for name in "xyz":
        assert fs.size(f"d/{name}") == 0
        assert fs.cat_file(f"d/{name}") == b""
        with fs.open(f"d/{name}") as file:
            assert (file.read(), file.read(5), file.size, file.readinto(bytearray(3))) == (
                b"",
                b"",
                0,
                0,
            )
            assert file.seek(0, io.SEEK_END) == 0
    assert [entry["size"] for entry in fs.ls("d")] == [1, 0, 0, 0]
    assert fs.cat_file("d/w") == b"\0"
    fs.cp_file("d/x", "d/copy")
    assert fs.size("d/copy") == 0
    fs.pipe_file("d/x", b"\0")
    assert fs.cat_file("d/x") == b"\0"


def test_mutable_memory_is_copied(store, fs):
    memory = bytearray(b"a" * (3 * MIB))
    with fs.open("x", "wb") as file:
        for letter in b"abcd":
            memory[:] = bytes([letter]) * len(memory)
            file.write(memory)
        memory[:] = b"z" * len(memory)
    assert store.get("x") == b"".join(letter * len(memory) for letter in (b"a", b"b", b"c", b"d"))


def test_pieces_of_every_length_keep_their_order(store, fs):
    lengths = [1, 70_000, 3, 0, 9 * MIB, 65_536, 7, 65_535, 8 * MIB]
    pieces = [bytes([at]) * length for at, length in enumerate(lengths)]
    whole = b"".join(pieces)
    for size in (None, len(whole)):
        for convert in (bytes, bytearray, memoryview):
            with fs.open("x", "wb", size=size) as file:
                for piece in pieces:
                    assert file.write(convert(piece)) == len(piece)
            assert store.get("x") == whole


def test_strings_and_gaps_are_refused(fs):
    with fs.open("x", "wb") as file:
        with pytest.raises(TypeError):
            file.write("text")
        with pytest.raises(BufferError, match="not contiguous"):
            file.write(memoryview(b"abcdef")[::2])
        assert file.write(memoryview(b"abcdefgh").cast("Q")) == 8
    assert fs.cat_file("x") == b"abcdefgh"


def test_memory_of_every_format_is_written(store):
    np = pytest.importorskip("numpy")
    arrays = [
        np.arange(3, dtype=">i4"),
        np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
        np.ones((2, 3), "f4"),
        np.array(5),
        np.zeros((0, 4)),
    ]
    for size in (None, sum(array.nbytes for array in arrays)):
        with store.file("x", "wb", size=size) as file:
            assert [file.write(array) for array in arrays] == [array.nbytes for array in arrays]
        assert store.get("x") == b"".join(array.tobytes() for array in arrays)


def test_copies_moves_and_removals(fs):
    write(fs, "a/1", "a/b/2", "c")
    fs.cp_file("a/1", "e")
    fs.cp("a", "copy", recursive=True)
    assert fs.find("copy") == ["copy/1", "copy/b/2"]
    fs.mv("copy", "moved", recursive=True)
    assert fs.find("copy") == []
    assert fs.cat_file("moved/b/2") == b"a/b/2"
    fs.mv("c", "f")
    assert (fs.exists("c"), fs.cat_file("f")) == (False, b"c")
    fs.rm(["e", "f"])
    fs.rm("a/*")
    assert fs.find("") == ["a/b/2", "moved/1", "moved/b/2"]
    fs.rm_file("a/b/2")
    fs.rm("moved", recursive=True)
    assert fs.find("") == []
    assert not fs.exists("moved")


def test_removal_of_a_leased_file_says_so(store, fs):
    write(fs, "x")
    with store.lease("x"), pytest.raises(mooncake.BusyError):
        fs.rm("x")
    assert fs.exists("x")


def test_trees_go_to_disk_and_back(fs, tmp_path, monkeypatch):
    # So that one file goes in parts.
    monkeypatch.setattr(transfers, "_WHOLE_BYTES", MIB)
    (tmp_path / "from/sub").mkdir(parents=True)
    (tmp_path / "from/a").write_bytes(b"a" * 100)
    (tmp_path / "from/empty").write_bytes(b"")
    (tmp_path / "from/sub/b").write_bytes(bytes(range(256)) * 40_000)
    fs.put(f"{tmp_path}/from", "tree", recursive=True)
    assert fs.find("tree") == ["tree/a", "tree/empty", "tree/sub/b"]
    fs.get("tree", f"{tmp_path}/to", recursive=True)
    for name in ("a", "empty", "sub/b"):
        assert (tmp_path / "to" / name).read_bytes() == (tmp_path / "from" / name).read_bytes()
    with pytest.raises(FileExistsError):
        fs.put_file(f"{tmp_path}/from/a", "tree/a", mode="create")


def test_interrupted_download_leaves_the_old_file(fs, tmp_path):
    fs.pipe_file("x", b"x" * 100)
    (tmp_path / "x").write_bytes(b"old")

    class Failing(fsspec.Callback):
        def relative_update(self, inc=1):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fs.get_file("x", str(tmp_path / "x"), callback=Failing())
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_file_that_changes_while_it_is_put_is_refused(fs, tmp_path, monkeypatch):
    source = tmp_path / "x"
    for longer, whole in [(True, 64), (True, 1), (False, 64), (False, 1)]:
        monkeypatch.setattr(transfers, "_WHOLE_BYTES", whole * MIB)
        source.write_bytes(b"x" * 20 * MIB)

        class Changing(fsspec.Callback):
            def relative_update(self, inc=1, longer=longer):
                with open(source, "r+b") as file:
                    file.truncate(30 * MIB if longer else 9 * MIB)

        with pytest.raises(OSError, match="changed while it was read"):
            fs.put_file(str(source), "x", callback=Changing())
        assert not fs.exists("x")


def test_files_that_do_not_fit_are_refused_whole(store, fs):
    fs.pipe_file("x", b"old")
    for size in (None, 100 * MIB):
        with pytest.raises(mooncake.NoSpaceError), fs.open("x", "wb", size=size) as file:
            file.write(bytes(100 * MIB))
    assert fs.cat_file("x") == b"old"
    assert fs.find("") == ["x"]


def test_listings_are_not_cached(store, fs):
    write(fs, "a")
    assert fs.ls("", detail=False) == ["a"]
    store.put("b", b"1")
    assert fs.ls("", detail=False) == ["a", "b"]
    store.delete("a")
    assert not fs.exists("a")


def test_reader_has_one_version(store, fs):
    fs.pipe_file("x", b"a" * 4 * MIB)
    with fs.open("x") as file:
        assert file.read(10) == b"a" * 10
        fs.pipe_file("x", b"b" * 4 * MIB)
        file.seek(3 * MIB)
        # The memory of the old version may be that of another object by now.
        with contextlib.suppress(mooncake.MooncakeError):
            assert set(file.read()) == {ord("a")}


def test_transactions_publish_at_their_end(fs):
    with fs.transaction:
        with fs.open("x", "wb") as file:
            file.write(b"1")
        assert not fs.exists("x")
    assert fs.cat_file("x") == b"1"
    with pytest.raises(RuntimeError), fs.transaction:
        write_and_fail(fs.open("y", "wb"))
    assert not fs.exists("y")


def test_options_of_files_are_stored(store):
    options = mooncake.PutOptions(soft_pin="enable")
    fs = fsspec.filesystem("mooncake", store=store, options=options)
    with fs.open("x", "wb", tags={"of": "me"}, ttl_s=100) as file:
        file.write(b"1")
    info = store.info("x")
    assert info.tags == {"of": "me"}
    assert 0 < info.expires_in_s <= 100
    assert info.soft_pin_ttl_s
    with pytest.raises(TypeError, match="ttl"):
        fs.open("y", "wb", ttl=100)


def test_async_calls(store):
    async def work():
        fs = fsspec.filesystem("mooncake", store=store, asynchronous=True)
        await asyncio.gather(*(fs._pipe_file(f"d/{at}", b"%d" % at) for at in range(20)))
        assert await fs._cat_file("d/7", 0, 1) == b"7"
        assert len(await fs._find("d")) == 20
        assert await fs._glob("d/1?") == [f"d/1{at}" for at in range(10)]
        assert await fs._exists("d/3")
        assert (await fs._info("d/3"))["size"] == 1
        assert len(await fs._ls("d")) == 20
        await fs._cp_file("d/3", "e")
        await fs._rm("d", recursive=True)
        assert await fs._find("") == ["e"]
        await fs._rm_file("e")
        with pytest.raises(FileNotFoundError):
            await fs._cat_file("e")

    asyncio.run(work())


def test_other_threads_share_a_file_system(fs):
    failures = []

    def work(number):
        try:
            for at in range(20):
                fs.pipe_file(f"{number}/{at}", b"x" * at)
                assert fs.cat_file(f"{number}/{at}") == b"x" * at
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(fs.find("")) == 80


def test_pickled_file_system_joins_again(store):
    store.put("x", b"1")
    fs = pickle.loads(pickle.dumps(fsspec.filesystem("mooncake", master=store.master_address)))
    assert fs.cat_file("x") == b"1"
    again = fsspec.AbstractFileSystem.from_json(fs.to_json())
    assert again.cat_file("x") == b"1"
    with mooncake.Store(store.master_address) as joined:
        fs = pickle.loads(pickle.dumps(fsspec.filesystem("mooncake", store=joined)))
        assert fs.cat_file("x") == b"1"
    with pytest.raises(TypeError, match="runs its own pool"):
        pickle.dumps(fsspec.filesystem("mooncake", store=store))


def test_opened_file_description_travels(store):
    store.put("x", b"1")
    opened = pickle.loads(pickle.dumps(fsspec.open(f"mooncake://{store.master_address}/x")))
    with opened as file:
        assert file.read() == b"1"


def test_forked_child_joins_again(store):
    script = """
import os, sys, fsspec
fs = fsspec.filesystem("mooncake", master=sys.argv[1])
fs.pipe_file("x", b"parent")
child = os.fork()
if not child:
    assert fs.cat_file("x") == b"parent"
    fs.pipe_file("x", b"child")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert fs.cat_file("x") == b"child"
"""
    done = run_script(script, store.master_address)
    assert (done.returncode, done.stderr) == (0, "")


def test_exit_with_open_files_is_silent(store):
    script = """
import sys, fsspec
fs = fsspec.filesystem("mooncake", master=sys.argv[1])
fs.pipe_file("x", b"1")
reader = fs.open("x")
reader.read(1)
"""
    done = run_script(script, store.master_address)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_store_is_joined_again(store):
    fs = fsspec.filesystem("mooncake", master=store.master_address)
    fs.pipe_file("x", b"1")
    fs.store.close()
    assert fs.cat_file("x") == b"1"


def test_package_without_fsspec_says_what_to_install():
    script = """
import sys
sys.modules["fsspec"] = None
import mooncake
import mooncake.files
try:
    mooncake.files.MooncakeFileSystem
except ModuleNotFoundError as error:
    print(error)
"""
    done = run_script(script)
    assert "mooncake-transfer-engine[files]" in done.stdout


def test_file_of_a_store(store):
    with store.file("a.json", "wb") as file:
        file.write(json.dumps({"a": 1}).encode())
    with store.file("a.json") as file:
        assert json.load(file) == {"a": 1}
    with store.file("a.json", "rb", 16) as file:
        assert file.read(1) == b"{"
    with store.file("a.json", "wb", tags={"t": "1"}, ttl_s=50):
        pass
    assert store.info("a.json").tags == {"t": "1", "mooncake.file": "empty"}
    with store.file("a.json") as file:
        assert file.read() == b""
    with pytest.raises(ValueError, match="not 'ab'"):
        store.file("a.json", "ab")
    with pytest.raises(TypeError, match="buffer_bytes="):
        store.file("a.json", 1024)
    with pytest.raises(mooncake.AlreadyExistsError, match=r"exists already.*a\.json"):
        store.file("a.json", "xb")
    with pytest.raises(mooncake.NotFoundError):
        store.file("none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = store.file("b", "wb")
        file.discard()
        del file
        gc.collect()
    assert not store.exists("b")
