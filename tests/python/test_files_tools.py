"""Python's data tools read and write files of the pool by URL."""

from __future__ import annotations

import json
import pickle

import pytest

from mooncake.files import stores

fsspec = pytest.importorskip("fsspec", reason="needs fsspec: pip install fsspec")


@pytest.fixture(autouse=True)
def leave_pools():
    """Close the connections that are shared, whose pools end with each test."""
    yield
    for store in stores._stores.values():
        store.close()
    stores._stores.clear()


@pytest.fixture
def root(store):
    """The URL of the pool."""
    return f"mooncake://{store.master_address}"


@pytest.fixture
def pd():
    return pytest.importorskip("pandas", reason="needs pandas: pip install pandas")


@pytest.fixture
def pa():
    return pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")


def test_json(root, store):
    with fsspec.open(f"{root}/run/settings.json", "w") as file:
        json.dump({"a": [1, 2]}, file)
    assert store.get("run/settings.json") == b'{"a": [1, 2]}'
    with fsspec.open(f"{root}/run/settings.json") as file:
        assert json.load(file) == {"a": [1, 2]}


def test_pickle(root):
    with fsspec.open(f"{root}/x.pkl", "wb") as file:
        pickle.dump([bytearray(1 << 20), "x"], file, protocol=5)
    with fsspec.open(f"{root}/x.pkl") as file:
        assert pickle.load(file) == [bytearray(1 << 20), "x"]


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "json", "parquet", "pkl"])
def test_pandas(root, store, pd, pa, suffix):
    frame = pd.DataFrame({"number": range(1000), "text": [f"row {at}" for at in range(1000)]})
    kind = suffix.split(".")[0]
    write, read = {
        "csv": (lambda url: frame.to_csv(url, index=False), pd.read_csv),
        "json": (frame.to_json, pd.read_json),
        "parquet": (frame.to_parquet, pd.read_parquet),
        "pkl": (frame.to_pickle, pd.read_pickle),
    }[kind]
    url = f"{root}/frames/a.{suffix}"
    write(url)
    assert store.exists(f"frames/a.{suffix}")
    pd.testing.assert_frame_equal(read(url), frame)
    with pytest.raises(FileNotFoundError):
        read(f"{root}/frames/none.{suffix}")


def test_pandas_takes_the_store_as_storage_option(store, pd):
    frame = pd.DataFrame({"a": [1, 2]})
    frame.to_csv("mooncake:///a.csv", index=False, storage_options={"store": store})
    read = pd.read_csv("mooncake:///a.csv", storage_options={"store": store})
    pd.testing.assert_frame_equal(read, frame)


def test_pyarrow_dataset(store, pa):
    dataset = pytest.importorskip("pyarrow.dataset")
    parquet = pytest.importorskip("pyarrow.parquet")
    fs = fsspec.filesystem("mooncake", store=store)
    table = pa.table({"part": [at % 3 for at in range(999)], "value": list(range(999))})
    parquet.write_to_dataset(table, "set", partition_cols=["part"], filesystem=fs)
    assert [path.rpartition("/")[0] for path in fs.find("set")] == [
        "set/part=0",
        "set/part=1",
        "set/part=2",
    ]
    found = dataset.dataset("set", filesystem=fs, partitioning="hive")
    assert found.count_rows() == 999
    chosen = found.to_table(columns=["value"], filter=dataset.field("part") == 1)
    assert chosen["value"].to_pylist() == list(range(1, 999, 3))
    # Only the parts that are asked for are read.
    parquet.write_table(table, "one.parquet", filesystem=fs, row_group_size=100)
    with fs.open("one.parquet") as file:
        assert parquet.ParquetFile(file).read_row_group(3)["value"].to_pylist() == list(
            range(300, 400)
        )


def test_pyarrow_file_system(store, pa):
    arrow = pytest.importorskip("pyarrow.fs")
    fs = arrow.PyFileSystem(arrow.FSSpecHandler(fsspec.filesystem("mooncake", store=store)))
    fs.create_dir("d")
    with fs.open_output_stream("d/a") as file:
        file.write(b"abc")
    with fs.open_input_file("d/a") as file:
        assert file.read_at(2, 1) == b"bc"
    [info] = fs.get_file_info(arrow.FileSelector("d"))
    assert (info.path, info.size, info.type) == ("d/a", 3, arrow.FileType.File)
    assert fs.get_file_info("none").type == arrow.FileType.NotFound
    fs.move("d/a", "d/b")
    fs.copy_file("d/b", "d/c")
    fs.delete_file("d/b")
    with fs.open_input_stream("d/c") as file:
        assert file.read() == b"abc"
    fs.delete_dir("d")
    assert store.exists("d/c") is False


def test_zarr(store):
    zarr = pytest.importorskip("zarr", reason="needs zarr: pip install zarr")
    np = pytest.importorskip("numpy")
    fs = fsspec.filesystem("mooncake", store=store, asynchronous=True)
    stored = zarr.storage.FsspecStore(fs, path="group")
    group = zarr.group(stored)
    values = np.arange(10_000, dtype="f4").reshape(100, 100)
    array = group.create_array("a/b", shape=values.shape, chunks=(30, 100), dtype=values.dtype)
    array[:] = values
    array.attrs["unit"] = "m"
    again = zarr.open_group(zarr.storage.FsspecStore(fs, path="group", read_only=True), mode="r")
    assert dict(again["a/b"].attrs) == {"unit": "m"}
    assert (again["a/b"][25:35, 3] == values[25:35, 3]).all()
    assert store.exists("group/a/b/zarr.json")
    del group["a"]
    assert list(store.keys("group/a/")) == []


def test_zarr_by_url(root):
    zarr = pytest.importorskip("zarr", reason="needs zarr: pip install zarr")
    array = zarr.create_array(f"{root}/z", shape=(10,), chunks=(3,), dtype="i4")
    array[:] = 7
    assert zarr.open_array(f"{root}/z", mode="r")[:].tolist() == [7] * 10


def test_torch(root, store):
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    state = {"weight": torch.arange(100_000, dtype=torch.float32), "step": 3}
    with fsspec.open(f"{root}/run/1.pt", "wb") as file:
        torch.save(state, file)
    with fsspec.open(f"{root}/run/1.pt") as file:
        loaded = torch.load(file)
    assert loaded["step"] == 3
    assert torch.equal(loaded["weight"], state["weight"])
    with store.file("run/2.pt", "wb") as file:
        torch.save(state, file)
    with store.file("run/2.pt") as file:
        assert torch.equal(torch.load(file, weights_only=True)["weight"], state["weight"])


def test_numpy(root):
    np = pytest.importorskip("numpy")
    values = np.arange(1000)
    with fsspec.open(f"{root}/x.npy", "wb") as file:
        np.save(file, values)
    with fsspec.open(f"{root}/x.npy") as file:
        assert (np.load(file) == values).all()
