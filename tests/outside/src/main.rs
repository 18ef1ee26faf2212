//! Starts a master, lends memory to its pool, and puts and gets from blocking and from async code.

use std::sync::Arc;

use mooncake_base::{ObjectKey, Result};
use mooncake_master::MasterConfig;
use mooncake_store_client::{ClientConfig, PutOutcome, Store};
use mooncake_transfer_engine::EngineConfig;

fn main() -> Result<()> {
    let runtime = tokio::runtime::Runtime::new().expect("the system has threads");
    let master = runtime.block_on(mooncake_master::start(MasterConfig::embedded()))?;
    let address = master.addresses().rpc.to_string();

    // Lends 64 MiB; `Store::connect` lends none.
    let lender = ClientConfig { segment_bytes: 64 << 20, ..ClientConfig::default() };
    let lender = Store::join(&address, EngineConfig::default(), lender)?;
    let store = Arc::new(Store::connect(&address)?);

    let key = ObjectKey::new(*b"greeting")?;
    assert_eq!(store.put(&key, b"Hello, Mooncake!")?, PutOutcome::Stored { replicas: 1 });

    let value = runtime.block_on(get(&store, key))?.expect("the object exists");
    println!("{}", String::from_utf8_lossy(&value));

    store.close();
    lender.close();
    runtime.block_on(master.stop());
    Ok(())
}

/// Gets an object from async code, on a thread that may block.
async fn get(store: &Arc<Store>, key: ObjectKey) -> Result<Option<Vec<u8>>> {
    let store = Arc::clone(store);
    let reading = tokio::task::spawn_blocking(move || store.get(&key));
    reading.await.expect("the call does not panic")
}
