"""The first programs of upstream's documents run unchanged, except for addresses."""

from __future__ import annotations

import pytest
from conftest import MasterProcess, assert_quiet, run_script

SETUP = """
store.setup(
    "localhost",           # Your node's address
    "{metadata}",    # HTTP metadata server
    512*1024*1024,          # 512MB segment size
    128*1024*1024,          # 128MB local buffer
    "tcp",                             # Use TCP (RDMA for high performance)
    "",                            # Leave empty; Mooncake auto-picks RDMA devices when needed
    "{master}"        # Master service
)
"""

HELLO = (
    """
from mooncake.store import MooncakeDistributedStore

# 1. Create store instance
store = MooncakeDistributedStore()

# 2. Setup with all required parameters
"""
    + SETUP
    + """
# 3. Store data
store.put("hello_key", b"Hello, Mooncake Store!")

# 4. Retrieve data
data = store.get("hello_key")
print(data.decode())  # Output: Hello, Mooncake Store!

# 5. Clean up
store.close()
"""
)

ARRAYS = (
    """
import numpy as np
import json
from mooncake.store import MooncakeDistributedStore

# 1. Initialize
store = MooncakeDistributedStore()
"""
    + SETUP
    + """
print("Store ready.")

# 2. Store data
store.put("config", b'{{"model": "llama-7b", "temperature": 0.7}}')
model_weights = np.random.randn(1000, 1000).astype(np.float32)
store.put("weights", model_weights.tobytes())
store.put("cache", b"some serialized cache data")

# 3. Retrieve and verify data
config = json.loads(store.get("config").decode())
weights = np.frombuffer(store.get("weights"), dtype=np.float32).reshape(1000, 1000)

print("Config OK:", config["model"])
print("Weights OK, mean =", round(float(weights.mean()), 4))
print("Cache exists?", bool(store.is_exist("cache")))

# 4. Close
store.close()
"""
)

ZERO_COPY = (
    """
import numpy as np
from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
"""
    + SETUP
    + """
original_data = np.random.randn(1000, 1000).astype(np.float32)
buffer_ptr = original_data.ctypes.data
size = original_data.nbytes

# Step 1: Register the buffer
result = store.register_buffer(buffer_ptr, size)
if result != 0:
    raise RuntimeError(f"Failed to register buffer: {{result}}")

# Step 2: Zero-copy store
result = store.put_from("large_tensor", buffer_ptr, size)
if result == 0:
    print(f"Successfully stored {{size}} bytes with zero-copy")
else:
    raise RuntimeError(f"Store failed with code: {{result}}")

# Step 3: Pre-allocate buffer for retrieval
retrieved_data = np.empty((1000, 1000), dtype=np.float32)
recv_buffer_ptr = retrieved_data.ctypes.data
recv_size = retrieved_data.nbytes

# Step 4: Register receive buffer
result = store.register_buffer(recv_buffer_ptr, recv_size)
if result != 0:
    raise RuntimeError(f"Failed to register receive buffer: {{result}}")

# Step 5: Zero-copy retrieval
bytes_read = store.get_into("large_tensor", recv_buffer_ptr, recv_size)
if bytes_read > 0:
    print(f"Successfully retrieved {{bytes_read}} bytes with zero-copy")
    # Verify the data
    print(f"Data matches: {{np.array_equal(original_data, retrieved_data)}}")
else:
    raise RuntimeError(f"Retrieval failed with code: {{bytes_read}}")

# Step 6: Clean up - unregister both buffers
store.unregister_buffer(buffer_ptr)
store.unregister_buffer(recv_buffer_ptr)
store.close()
"""
)


@pytest.fixture(params=["http", "P2PHANDSHAKE", "embedded"])
def addresses(request, master: MasterProcess) -> dict[str, str]:
    """Addresses instead of the printed ones, whose ports may be in use."""
    if request.param == "embedded":
        return {"metadata": "P2PHANDSHAKE", "master": "embedded"}
    if request.param == "http":
        metadata = f"http://{master.metadata}/metadata"
        return {"metadata": metadata, "master": master.address.replace("127.0.0.1", "localhost")}
    return {"metadata": request.param, "master": master.address}


def test_hello_world_runs(addresses):
    done = run_script(HELLO.format(**addresses))
    assert_quiet(done)
    assert done.stdout == "Hello, Mooncake Store!\n"


def test_array_program_runs(addresses):
    done = run_script(ARRAYS.format(**addresses))
    assert_quiet(done)
    assert "Config OK: llama-7b\n" in done.stdout
    assert "Cache exists? True\n" in done.stdout


def test_zero_copy_program_runs(addresses):
    done = run_script(ZERO_COPY.format(**addresses))
    assert_quiet(done)
    assert "Successfully stored 4000000 bytes with zero-copy\n" in done.stdout
    assert "Data matches: True\n" in done.stdout
